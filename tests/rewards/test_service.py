import asyncio
import subprocess
import sys
import threading

import pytest

from lit_qrl.rewards import service
from lit_qrl.rewards.service import Gathering, awaited, called
from lit_qrl.rewards.workers import Failure


def gather(calls, limit=float("inf"), **options):
    gathering = Gathering(**options)
    gathering.begin(dict(enumerate(calls)))
    return gathering.end(limit)


def test_results_are_in_order_and_no_more_run_at_once_than_allowed():
    lock, inside, most = threading.Lock(), 0, 0
    barrier = threading.Barrier(3, timeout=30)  # nine calls, three at a time, meet here in threes

    def call(i):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        barrier.wait()
        with lock:
            inside -= 1
        barrier.wait()
        return i

    assert gather([lambda i=i: call(i) for i in range(9)], concurrency=3, timeout=60) == list(range(9))
    assert most == 3


def test_coroutines_wait_at_the_same_time():
    started, all_started = [], asyncio.Event()

    async def call(i):
        started.append(i)
        if len(started) == 5:
            all_started.set()
        await all_started.wait()
        return i

    assert gather([lambda i=i: call(i) for i in range(5)], concurrency=5, timeout=60) == list(range(5))


def test_what_fails_or_is_late_is_a_failure_and_tried_again(monkeypatch):
    monkeypatch.setattr(service, "FIRST_PAUSE", 0.01)
    tries = [0, 0, 0]
    never = threading.Event()

    def call(i):
        tries[i] += 1
        if i == 0:
            never.wait(60)
        if i == 1 and tries[1] < 2:
            raise ValueError("once")
        return i

    results = gather([lambda i=i: call(i) for i in range(3)], concurrency=3, timeout=1.0, retries=1)
    never.set()
    assert results == [Failure("not done within 1 s"), 1, 2]
    assert tries == [2, 2, 1]


def test_all_together_have_a_limit():
    never, called = threading.Event(), []
    calls = [lambda i=i: called.append(i) or never.wait(60) for i in range(3)]
    results = gather(calls, concurrency=1, timeout=60, retries=5, limit=0.5)
    never.set()
    assert called == [0]
    assert results[0] == Failure("not done within 0.5 s")
    assert results[1:] == [Failure("timed out in the queue after 0.5 s")] * 2


def test_the_event_loop_stays_open_between_calls():
    async def where():
        return asyncio.get_running_loop()

    first, second = awaited(where(), 60), awaited(where(), 60)
    assert first is second
    assert first.is_running()
    assert awaited([1.0], 60) == [1.0]


def test_a_late_coroutine_is_named_and_its_own_timeout_is_its_own():
    with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
        awaited(asyncio.sleep(60), 0.05)

    async def own():
        raise TimeoutError("the service")

    with pytest.raises(TimeoutError, match="the service"):
        awaited(own(), 60)


def test_a_plain_function_runs_beside_the_event_loop_and_an_async_one_in_it():
    def plain(a, b):
        return threading.current_thread().name, a + b

    async def awaited(a):
        return threading.current_thread().name, a

    assert asyncio.run(called(plain, 1, 2)) == ("user code", 3)
    assert asyncio.run(called(awaited, 4)) == (threading.current_thread().name, 4)


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(), SystemExit(2)])
def test_what_a_function_raises_is_an_ordinary_error(error):
    def failing():
        raise error

    with pytest.raises(type(error) if isinstance(error, KeyError) else RuntimeError):
        asyncio.run(called(failing))


def test_late_calls_leave_no_threads_behind():
    def call():
        while True:
            pass

    before = set(threading.enumerate())
    late = Failure("not done within 0.3 s")
    for _ in range(3):
        assert gather([call, call], concurrency=2, timeout=0.3) == [late, late]
    left = [one for one in threading.enumerate() if one not in before and one.name == "user code"]
    for one in left:
        one.join(30)
    assert not any(one.is_alive() for one in left)


def test_a_call_that_holds_the_interpreter_ends_the_process():
    code = (
        "import re; from lit_qrl.rewards import FunctionReward, Sample, limit; limit.GRACE = 0.5\n"
        "def hold(completions): re.match('(a+)+$', 'a' * 60 + 'b')\n"
        "FunctionReward(hold, concurrency=2, timeout=0.5)([Sample('', '')])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert 'File "<string>", line 2 in hold' in ended.stderr
