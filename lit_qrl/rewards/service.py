"""Many calls at the same time of a function that waits for a service: each bounded, repeated when it failed."""

import asyncio
import faulthandler
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

from lit_qrl.rewards.limit import abandon, end_if_held, in_thread
from lit_qrl.rewards.workers import Failure

FIRST_PAUSE = 0.5
"""Seconds before a failed call is repeated; twice as many each time after."""
BEAT = 1.0
"""Seconds between two signs of life of an interpreter that calls may hold."""
LOOK = 0.1
"""Seconds between two looks at how many calls are done."""


class HoldingEnds:
    """Ends the process where calls of an event loop, while they are in this context, hold the interpreter too long.

    Args:
        seconds: for one call; the process ends `limit.GRACE` later.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._inside = seconds, 0
        self._next: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._inside += 1
        if self._inside == 1:
            self._beat()

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if not self._inside:
            if self._next is not None:
                self._next.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        end_if_held(self.seconds)
        self._next = asyncio.get_running_loop().call_later(BEAT, self._beat)


class Gathering:
    """Calls that may come one after another, and what they return in the end.

    Functions run in threads, what they return to be awaited in one event loop that stays open. A thread that is late
    ends at its next line of Python (`abandon`); where one holds the interpreter, the process ends (`HoldingEnds`).

    Args:
        concurrency: calls at the same time.
        timeout: seconds for one.
        retries: how often a failed one is repeated.
        apart: the calls only wait for processes of their own.

    >>> calls = Gathering(concurrency=2, timeout=60)
    >>> calls.begin({1: lambda: "second"})
    >>> calls.begin({0: lambda: "first"})
    >>> calls.end()
    ['first', 'second']
    """

    def __init__(self, concurrency: int, timeout: float, retries: int = 0, apart: bool = False) -> None:
        self.timeout, self.retries = timeout, retries
        self._places = asyncio.Semaphore(concurrency)
        self._held = nullcontext() if apart else HoldingEnds(timeout)
        self._begun: set[int] = set()
        self._open, self._worked, self._since = 0, 0.0, 0.0
        self._results: dict[int, Future[Any]] = {}

    def begin(self, calls: Mapping[int, Callable[[], Any]]) -> None:
        """Take calls by their positions."""
        for position, call in calls.items():
            self._results[position] = asyncio.run_coroutine_threadsafe(self._made(position, call), _loop("calls"))

    def end(self, limit: float = float("inf"), progress: Callable[[int, int], None] | None = None) -> list[Any]:
        """Return what the calls have returned, in the order of their positions; a `Failure` where there is none.

        Args:
            limit: seconds from now, after which what is not done has failed.
            progress: called with (calls done, calls).
        """
        last, told, left = time.monotonic() + limit, -1, set(self._results.values())
        try:
            while left:
                seconds = min(last - time.monotonic(), threading.TIMEOUT_MAX if progress is None else LOOK)
                left = wait(left, max(seconds, 0.0)).not_done
                if progress is not None and len(self._results) - len(left) != told:
                    told = len(self._results) - len(left)
                    progress(told, len(self._results))
                if time.monotonic() >= last:
                    break
        finally:
            begun = set(self._begun)
            self.drop()
        late, unbegun = Failure(f"not done within {limit:g} s"), Failure(f"timed out in the queue after {limit:g} s")
        return [
            (late if position in begun else unbegun) if one.cancelled() else one.result()
            for position, one in sorted(self._results.items())
        ]

    def drop(self) -> None:
        """Give up what is not done."""
        for position in sorted(self._results, key=self._begun.__contains__):  # or those that wait would take the places
            self._results[position].cancel()

    @property
    def seconds(self) -> float:
        """In which some call was under way."""
        return self._worked + (time.monotonic() - self._since if self._open else 0.0)

    async def _made(self, position: int, call: Callable[[], Any]) -> Any:
        self._since = self._since if self._open else time.monotonic()
        self._open += 1
        result: Any = None
        try:
            for attempt in range(self.retries + 1):
                if attempt:
                    await asyncio.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
                async with self._places:
                    self._begun.add(position)
                    try:
                        with self._held:
                            result = await asyncio.wait_for(_caught(call), self.timeout)
                    except TimeoutError:
                        result = Failure(f"not done within {self.timeout:g} s")
                if not isinstance(result, Failure):
                    break
            return result
        finally:
            worked = self.seconds
            self._open -= 1
            self._worked = self._worked if self._open else worked


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns: awaited where it is `async`, else run in a thread, beside all other calls."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    running = in_thread(function, *arguments)
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        abandon(running)
        raise


async def _caught(call: Callable[[], Any]) -> Any:
    """Return what a call returns, a `Failure` of what it raises."""
    try:
        result = await called(lambda: _whole(call()))
        # in a loop of its own: what blocks there keeps no clock here from running
        return await asyncio.wrap_future(_begun(result)) if inspect.isawaitable(result) else result
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Failure(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _whole(result: Any) -> Any:
    """Return what a function yields as a list, what it returns as it is."""
    return list(result) if inspect.isgenerator(result) else result


def _begun(awaitable: Any) -> "Future[Any]":
    async def awaited() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(awaited(), _loop("functions"))


_loops: dict[str, asyncio.AbstractEventLoop] = {}
_one_at_a_time = threading.Lock()


def _loop(name: str) -> asyncio.AbstractEventLoop:
    """Return an event loop of this process's rewards; it stays open, so that a client may live longer than a call."""
    with _one_at_a_time:  # the first calls come from several threads, which would make a loop each
        if name not in _loops:
            _loops[name] = asyncio.new_event_loop()
            threading.Thread(target=_loops[name].run_forever, name=f"reward {name}", daemon=True).start()
        return _loops[name]


def awaited(result: Any, timeout: float) -> Any:
    """Return what is to be awaited, from the rewards' event loop; what is yielded as a list, all else as it is.

    Raises:
        TimeoutError: it is late; it is cancelled.
    """
    if not inspect.isawaitable(result):
        return _whole(result)
    future = _begun(result)
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():  # the function's own
            raise
        raise TimeoutError(f"not done within {timeout:g} s") from None
    finally:
        future.cancel()
