import copy
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from lit_qrl.rewards.workers import Failure, WorkerPool, WorkerStartError

HERE = "tests.rewards.test_workers"


def echo(value):
    return value


def sleep(seconds):
    time.sleep(seconds)
    return "awake"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def devour():
    return len(bytearray(8 << 30))


def evaluate(text):
    return eval(text)  # what a worker must not do


def run(command):
    return os.system(command)


def write(path):
    with open(path, "w") as file:
        return file.write("x")


def chatter():
    print("noise on stdout", flush=True)
    os.write(1, b"more noise\n")
    return "quiet"


@pytest.fixture
def pool():
    pools = []

    def make(name, **kwargs):
        pools.append(WorkerPool(f"{HERE}:{name}", **kwargs))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_in_order_from_several_workers(pool):
    workers = pool("echo", size=3, timeout=30.0)
    values = [{"n": n, "text": "é\n\ud800"} for n in range(50)]
    assert workers.map([(value,) for value in values]) == values
    assert 1 <= len(workers.pids) <= 3


def test_nothing_starts_before_there_is_work(pool):
    workers = pool("echo", size=3)
    assert workers.pids == []
    assert workers.map([]) == []
    assert workers.pids == []


def test_no_more_workers_than_calls(pool):
    workers = pool("echo", size=3, timeout=30.0)
    workers.map([(1,)])
    assert len(workers.pids) == 1


def test_a_late_worker_is_killed_and_the_others_go_on(pool):
    workers = pool("sleep", size=1, timeout=2.0)
    assert workers.map([(0,)]) == ["awake"]
    (first,) = workers.pids
    late, soon = workers.map([(600,), (0,)])
    assert late == Failure("not done within 2 s")
    assert soon == "awake"
    assert not is_alive(first)
    assert workers.map([(0,)]) == ["awake"]


def test_a_worker_that_dies_costs_only_its_call(pool):
    workers = pool("die", size=1, timeout=30.0)
    (result,) = workers.map([()])
    assert isinstance(result, Failure)
    assert "died" in result.reason


def test_a_worker_killed_while_idle_is_replaced(pool):
    workers = pool("echo", size=1, timeout=30.0)
    workers.map([(1,)])
    (pid,) = workers.pids
    os.kill(pid, signal.SIGKILL)
    while workers.pids:
        time.sleep(0.01)
    assert workers.map([(2,)]) == [2]


def test_memory_is_limited(pool):
    (result,) = pool("devour", timeout=30.0).map([()])
    assert isinstance(result, Failure)
    assert "MemoryError" in result.reason


@pytest.mark.parametrize("name, argument", [("evaluate", "1+1"), ("run", "true"), ("write", "/dev/null")])
def test_a_worker_neither_evaluates_source_nor_runs_programs_nor_writes(pool, name, argument):
    (result,) = pool(name, timeout=30.0).map([(argument,)])
    assert isinstance(result, Failure)
    assert "PermissionError" in result.reason


def test_what_a_library_prints_does_not_disturb(pool):
    assert pool("chatter", timeout=30.0).map([(), ()]) == ["quiet", "quiet"]


def test_exceptions_become_failures(pool):
    assert pool("echo", timeout=30.0).map([(1, 2)])[0].reason.startswith("TypeError")


def test_close_leaves_no_process_and_may_be_repeated(pool):
    workers = pool("echo", size=2, timeout=30.0)
    workers.map([(n,) for n in range(8)])
    pids = workers.pids
    workers.close()
    workers.close()
    assert not any(map(is_alive, pids))
    assert workers.map([(1,)]) == [1]


def test_a_pool_that_is_forgotten_leaves_no_process():
    workers = WorkerPool(f"{HERE}:echo", timeout=30.0)
    workers.map([(1,)])
    (pid,) = workers.pids
    del workers
    assert not is_alive(pid)


def test_workers_end_with_their_parent_even_when_it_is_killed():
    code = (
        "from lit_qrl.rewards.workers import WorkerPool; import os, signal;"
        f"p = WorkerPool('{HERE}:echo', timeout=30.0);"
        "p.map([(1,)]); print(p.pids[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(result.stdout)
    for _ in range(1000):
        if not is_running(pid):
            break
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid):
    """Whether a process of ours or of a dead parent runs; one that nobody waits for may stay as a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_unknown_function_is_an_error(pool):
    with pytest.raises(WorkerStartError, match="no_such_function"):
        pool("no_such_function").map([()])


def test_pools_can_be_copied(pool):
    workers = pool("echo", size=2, timeout=30.0)
    workers.map([(1,)])
    for twin in (copy.deepcopy(workers), pickle.loads(pickle.dumps(workers))):
        assert (twin.function, twin.size, twin.timeout) == (workers.function, 2, 30.0)
        assert twin.pids == []


def test_an_interrupt_kills_the_workers_and_later_calls_get_their_own_answers(pool):
    workers = pool("sleep", size=2, timeout=60.0)
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
