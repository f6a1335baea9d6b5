import asyncio
import queue
import threading
from functools import partial

import pytest

from lit_qrl.data.environment import Threads, called
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Sample
from lit_qrl.rewards.simple import ConstantReward
from lit_qrl.types import Episode
from tests.loop.test_turns import Echo


def test_a_plain_function_runs_beside_the_event_loop_and_an_async_one_in_it():
    def plain(a, b):
        return threading.current_thread().name, a + b

    async def awaited(a):
        return threading.current_thread().name, a

    assert asyncio.run(called(plain, 1, 2)) == ("environment", 3)
    assert asyncio.run(called(awaited, 4)) == (threading.current_thread().name, 4)


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(), SystemExit(2)])
def test_what_a_function_raises_is_an_ordinary_error(error):
    def failing():
        raise error

    with pytest.raises(type(error) if isinstance(error, KeyError) else RuntimeError):
        asyncio.run(called(failing))


def test_an_abandoned_function_does_not_trouble_the_loop_that_left_it():
    release = threading.Event()

    async def abandon():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(called(release.wait), timeout=0.01)

    asyncio.run(abandon())
    release.set()


def test_calls_run_side_by_side_and_in_threads_that_have_come_back():
    threads, release, seen = Threads(), threading.Event(), queue.SimpleQueue()

    def call(number):
        seen.put((number, threading.get_ident()))

    def held():
        release.wait()
        call(0)

    threads.run(held)
    found = []
    for number in range(1, 40):  # none waits for the one that is held up
        threads.run(partial(call, number))
        found.append(seen.get(timeout=60))
    release.set()
    found.append(seen.get(timeout=60))
    assert sorted(number for number, _ in found) == list(range(40))
    assert len({thread for _, thread in found}) < 40


def test_a_thread_without_a_call_ends_and_the_next_call_has_another():
    threads, done = Threads(patience=0.001), queue.SimpleQueue()
    for _ in range(20):
        threads.run(lambda: done.put(threading.current_thread()))
        thread = done.get(timeout=60)
        thread.join(60)
        assert not thread.is_alive()


def test_a_forked_process_has_threads_of_its_own():
    threads, done = Threads(), queue.SimpleQueue()
    threads.run(partial(done.put, 1))
    assert done.get(timeout=60) == 1
    threads._begin()  # as the system calls it in the child
    threads.run(partial(done.put, 2))
    assert done.get(timeout=60) == 2


@pytest.mark.parametrize("limit", ["max_turns", "time_limit", "max_message_tokens"])
def test_limits_are_positive(limit):
    with pytest.raises(ConfigError, match=f"Echo's {limit} is too small"):
        Echo(**{limit: 0})


def test_a_conversation_is_solved_from_a_score_on():
    played = [Episode(score=score, ended="done", turns=1) for score in (0.4, 0.5, None)]
    samples = [Sample("", "", episode=one) for one in (*played, None)]
    assert Echo(solved_at=0.5).is_correct(samples) == [False, True, False, False]
    assert [reward.name for reward in Echo().rewards] == ["episode"]
    assert [reward.name for reward in Echo(rewards=[ConstantReward()]).rewards] == ["constant"]
