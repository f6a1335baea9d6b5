import copy
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_qrl.rewards.workers import Failure, WorkerPool, WorkerStartError


def echo(value):
    return value


def sleep(seconds):
    time.sleep(seconds)
    return "awake"


def backtrack(length):
    return re.match(r"(a+)+$", "a" * (length - 10) + "b") if length > 30 else None


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def devour():
    return len(bytearray(8 << 30))


def fork(status):
    if os.fork() == 0 and status is not None:
        os._exit(status)
    return os.getpid()


def lists():
    import decimal

    import numpy as np

    return np.float32(0.5), np.arange(2), decimal.Decimal("0.25"), float("inf")


class Refuses:
    def __reduce__(self):
        return int, ("no number",)


_refuses = Refuses()
_refuses.__name__ = "Refuses"


def chatter():
    print("noise on stdout", flush=True)
    os.write(1, b"more noise\n")
    return "quiet"


@pytest.fixture
def pool():
    pools = []

    def make(function, **kwargs):
        pools.append(WorkerPool(function, **kwargs))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def is_gone(pid):
    """Whether a process has ended within 10 s; one that nobody waits for may stay as a zombie."""
    for _ in range(1000):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_results_come_in_order_from_several_workers(pool):
    workers = pool(echo, size=3, timeout=30.0)
    assert workers.map([(1,)]) == [1]
    assert len(workers.pids) == 1  # no more than there are calls
    values = [{"n": n, "text": "é\n\ud800"} for n in range(50)]
    assert workers.map([(value,) for value in values]) == values
    assert 1 <= len(workers.pids) <= 3


def test_a_late_worker_is_killed_and_the_others_go_on(pool):
    workers = pool(sleep, size=1, timeout=2.0)
    assert workers.map([(0,)]) == ["awake"]
    (first,) = workers.pids
    late, soon = workers.map([(600,), (0,)])
    assert late == Failure("not done within 2 s")
    assert soon == "awake"
    assert is_gone(first)
    assert workers.map([(0,)]) == ["awake"]


@pytest.mark.parametrize(("function", "reason"), [(die, "died"), (devour, "MemoryError")])
def test_a_worker_that_dies_or_wants_too_much_memory_costs_only_its_call(pool, function, reason):
    (result,) = pool(function, timeout=30.0, confined=function is devour).map([()])
    assert isinstance(result, Failure)
    assert reason in result.reason


def test_a_worker_killed_while_idle_is_replaced(pool):
    workers = pool(echo, size=1, timeout=30.0)
    workers.map([(1,)])
    (pid,) = workers.pids
    os.kill(pid, signal.SIGKILL)
    while workers.pids:
        time.sleep(0.01)
    assert workers.map([(2,)]) == [2]


HARM = {
    "source": "eval(compile('1+1', '<string>', 'eval'))",
    "program": "os.system('true')",
    "subprocess": "subprocess.run(['true'])",
    "fork": "os.fork()",
    "write": "open('{file}', 'a')",
    "os.open": "os.open('{file}', os.O_WRONLY)",
    "create": "os.open('{file}.new', os.O_CREAT)",
    "unlink": "os.unlink('{file}')",
    "rename": "os.rename('{file}', '{file}.new')",
    "chmod": "os.chmod('{file}', 0)",
    "kill": "os.kill(os.getppid(), 0)",
    "ctypes": "ctypes.CDLL(None)",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM)",
    "limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))",
}


@pytest.mark.parametrize("kind", HARM)
def test_a_confined_worker_does_no_harm(kind, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    code = (
        "import ctypes, os, resource, socket, subprocess, sys;"
        "from lit_qrl.rewards.workers import confine;"
        "code = compile(sys.argv[1], 'harm.py', 'eval'); confine(4 << 30)\n"
        "try: eval(code)\nexcept PermissionError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, HARM[kind].format(file=file)], capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("A worker ")
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_library_prints_does_not_disturb(pool):
    assert pool(chatter, timeout=30.0).map([(), ()]) == ["quiet", "quiet"]


def test_close_leaves_no_process_and_may_be_repeated(pool):
    workers = pool(echo, size=2, timeout=30.0)
    workers.map([(n,) for n in range(8)])
    pids = workers.pids
    workers.close()
    workers.close()
    assert all(map(is_gone, pids))
    assert workers.map([(1,)]) == [1]


def test_a_pool_that_is_forgotten_leaves_no_process():
    workers = WorkerPool(echo, timeout=30.0)
    workers.map([(1,)])
    (pid,) = workers.pids
    del workers
    assert is_gone(pid)


def test_workers_end_with_their_parent_even_when_it_is_killed():
    code = (
        "from lit_qrl.rewards.workers import WorkerPool; from tests.rewards.test_workers import sleep;"
        "import os, signal, threading; p = WorkerPool(sleep, timeout=600.0);"
        "p.map([(0,)]); print(p.pids[0], flush=True); threading.Thread(target=p.call, args=(600,)).start();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(result.stdout)
    assert is_gone(pid)


def test_a_function_that_no_worker_can_import_is_an_error(pool):
    def within():
        pass

    for function in (within, _refuses):
        with pytest.raises(WorkerStartError, match=f"{function.__name__} does not start"):
            pool(function).map([()])


def test_pools_can_be_copied(pool):
    workers = pool(echo, size=2, timeout=30.0)
    workers.map([(1,)])
    for twin in (copy.deepcopy(workers), pickle.loads(pickle.dumps(workers))):
        assert (twin.function, twin.size, twin.timeout) == (echo, 2, 30.0)
        assert twin.pids == []


def test_an_interrupt_kills_the_workers_and_later_calls_get_their_own_answers(pool):
    workers = pool(sleep, size=2, timeout=60.0)
    workers.map([(0,)])

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.map([(30,), (30,)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert workers.pids == []
    assert workers.map([(0,)]) == ["awake"]


def test_a_child_that_returns_ends_and_its_parent_answers(pool, capfd):
    workers = pool(fork, timeout=30.0)
    first, second = workers.map([(None,), (0,)])
    assert first == second  # one process has answered both
    said, patience = "", time.monotonic() + 30
    while "the child returned: it ends here" not in said and time.monotonic() < patience:
        said += capfd.readouterr().err
        time.sleep(0.05)
    assert "the child returned: it ends here" in said


def test_numbers_of_libraries_come_back_as_numbers(pool):
    assert pool(lists, timeout=30.0).map([()]) == [[0.5, [0, 1], 0.25, float("inf")]]
    (result,) = pool(echo, timeout=30.0).map([(object(),)])
    assert result.reason.startswith("TypeError")
    (result,) = pool(echo, timeout=30.0).map([(lambda: 1,)])
    assert "cannot go to another process" in result.reason


def test_calls_come_from_any_thread_and_those_that_hold_the_interpreter_end(pool):
    workers = pool(backtrack, timeout=1.0)
    workers.start()
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(workers.call, [20, 60, 60, 20]))
    late = Failure("not done within 1 s")
    assert results == [None, late, late, None]
