"""Many calls at the same time of a function that waits for a service: each bounded, repeated when it failed."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from lit_qrl.rewards.workers import Failure

FIRST_PAUSE = 0.5
"""Seconds before a failed call is repeated; twice as many each time after."""


class _Call(NamedTuple):
    """A call that waits for its turn: from when it may begin, its position, and how often it was tried before."""

    begin: float
    position: int
    attempt: int


def gather(
    calls: Sequence[Callable[[], Any]],
    concurrency: int,
    timeout: float,
    retries: int = 0,
    progress: Callable[[int, int], None] | None = None,
    limit: float = float("inf"),
) -> list[Any]:
    """Return what the calls return, in order; a `Failure` for each that raised or was late to the last.

    Functions run in threads, what they return to be awaited in one event loop that stays open. A thread that is late
    cannot be ended, and is left alone.

    Args:
        calls: without arguments.
        concurrency: calls at the same time.
        timeout: seconds for one.
        retries: how often a failed one is repeated.
        progress: called with (calls done, calls).
        limit: seconds for all; those that are not done then have failed.

    >>> gather([lambda: 1, lambda: 1 / 0], concurrency=2, timeout=60)
    [1, Failure(reason='ZeroDivisionError: division by zero')]
    """
    results: list[Any] = [None] * len(calls)
    finished: queue.SimpleQueue[tuple[_Call, Any]] = queue.SimpleQueue()
    waiting = [_Call(0.0, i, 0) for i in range(len(calls))]
    running: dict[_Call, tuple[float, Callable[[], Any]]] = {}
    end, done = time.monotonic() + limit, 0
    while waiting or running:
        now = time.monotonic()
        for one in [one for one in waiting if one.begin <= now][: max(concurrency - len(running), 0)]:
            waiting.remove(one)
            running[one] = (min(now + timeout, end), _start(calls[one.position], one, finished))
        moments = [deadline for deadline, _ in running.values()]
        moments += [one.begin for one in waiting if one.begin > now and len(running) < concurrency]
        outcomes: list[tuple[_Call, Any]] = []
        try:
            outcomes.append(finished.get(timeout=max(min(moments, default=now) - now, 0.0)))
        except queue.Empty:
            now = time.monotonic()
            for one, (deadline, cancel) in running.items():
                if deadline <= now:
                    cancel()
                    outcomes.append((one, Failure(f"not done within {min(timeout, limit):g} s")))
        for one, result in outcomes:
            if running.pop(one, None) is None:  # it was late, and has come after all
                continue
            now = time.monotonic()
            if isinstance(result, Failure) and one.attempt < retries and now < end:
                waiting.append(_Call(now + FIRST_PAUSE * 2**one.attempt, one.position, one.attempt + 1))
                continue
            results[one.position], done = result, done + 1
            if progress is not None:
                progress(done, len(calls))
        if time.monotonic() >= end:
            for one in waiting:
                results[one.position] = Failure(f"its turn did not come within {limit:g} s")
            waiting.clear()
    return results


def _start(call: Callable[[], Any], one: _Call, finished: "queue.SimpleQueue[tuple[_Call, Any]]") -> Callable[[], Any]:
    """Begin a call, and return what gives it up."""
    pending: list[Any] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            result = call()
            if asyncio.iscoroutine(result) or hasattr(result, "__await__"):
                future = asyncio.run_coroutine_threadsafe(_awaited(result), _loop())
                pending.append(future)
                if given_up.is_set():
                    future.cancel()
                future.add_done_callback(lambda future: finished.put((one, _outcome(future))))
                return
        except BaseException as error:
            result = failure(error)
        finished.put((one, result))

    def give_up() -> None:
        given_up.set()
        for future in pending:
            future.cancel()

    threading.Thread(target=run, name="reward call", daemon=True).start()
    return give_up


def _outcome(future: Any) -> Any:
    try:
        return future.result()
    except BaseException as error:  # a cancelled one's, too
        return failure(error)


def failure(error: BaseException) -> Failure:
    """Return what is remembered of an error."""
    return Failure(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's rewards; it stays open, so that a client may live longer than a call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward loop", daemon=True).start()
    return loop


def awaited(result: Any, timeout: float) -> Any:
    """Return what is to be awaited, from the rewards' event loop; what needs no waiting is returned as it is.

    Raises:
        TimeoutError: it is late; it is cancelled.
    """
    if not (asyncio.iscoroutine(result) or hasattr(result, "__await__")):
        return result
    future = asyncio.run_coroutine_threadsafe(_awaited(result), _loop())
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():  # the function's own
            raise
        raise TimeoutError(f"not done within {timeout:g} s") from None
    finally:
        future.cancel()
