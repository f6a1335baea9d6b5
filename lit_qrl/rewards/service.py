"""Many calls at the same time of a function that waits for a service: each bounded, repeated when it failed."""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from lit_qrl.rewards.workers import Failure

FIRST_PAUSE = 0.5
"""Seconds before a failed call is repeated; twice as many each time after."""
LOOK = 0.1
"""Seconds between two looks at how many calls are done."""


class _Call(NamedTuple):
    """A call that waits for its turn: from when it may begin, its position, and how often it was tried before."""

    begin: float
    position: int
    attempt: int


class Gathering:
    """Calls that may come one after another, and what they return in the end.

    Functions run in threads, what they return to be awaited in one event loop that stays open. A thread that is late
    cannot be ended, and is left alone.

    Args:
        concurrency: calls at the same time.
        timeout: seconds for one.
        retries: how often a failed one is repeated.

    >>> calls = Gathering(concurrency=2, timeout=60)
    >>> calls.start()
    >>> calls.add({1: lambda: "second"})
    >>> calls.add({0: lambda: "first"})
    >>> calls.end()
    ['first', 'second']
    """

    def __init__(self, concurrency: int, timeout: float, retries: int = 0) -> None:
        self.concurrency, self.timeout, self.retries = concurrency, timeout, retries
        self.clock = Clock()
        self._events: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._results: dict[int, Any] = {}
        self._count = 0
        self._calls: dict[int, Callable[[], Any]] = {}
        self._waiting: list[_Call] = []
        self._running: dict[_Call, tuple[float, Callable[[], None]]] = {}
        self._last, self._limit = float("inf"), float("inf")
        self._over = False
        self._done = threading.Event()

    def add(self, calls: Mapping[int, Callable[[], Any]]) -> None:
        """Take calls by their positions; of any thread."""
        self._count += len(calls)
        self._events.put(("add", calls, None))

    def start(self) -> None:
        """Work in a thread of its own from now on."""
        threading.Thread(target=self.work, name="rewards", daemon=True).start()

    def finish(self, limit: float = float("inf")) -> None:
        """Take nothing more, and fail what is not done within so many seconds from now."""
        self._events.put(("finish", time.monotonic() + limit, limit))

    def drop(self) -> None:
        """Give up what is not done."""
        self._events.put(("finish", float("-inf"), 0.0))

    def end(self, limit: float = float("inf"), progress: Callable[[int, int], None] | None = None) -> list[Any]:
        """Return what the calls have returned, in the order of their positions; a `Failure` where there is none.

        Args:
            limit: seconds from now.
            progress: called with (calls done, calls).
        """
        self.finish(limit)
        told = -1
        while not self._done.wait(LOOK if progress is not None else None):
            if progress is not None and len(self._results) != told:
                told = len(self._results)
                progress(told, self._count)
        return self.results()

    def results(self) -> list[Any]:
        """Return what the calls have returned, in the order of their positions."""
        return [self._results[position] for position in sorted(self._results)]

    def work(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make the calls until `finish` and the last of them."""
        while self._waiting or self._running or not self._over:
            now = time.monotonic()
            for one in self._ready(now):
                self._waiting.remove(one)
                cancel = _start(self._calls[one.position], one, self._events)
                self._running[one] = (min(now + self.timeout, self._last), cancel)
            self.clock.run(bool(self._waiting or self._running))
            for one, result in self._outcomes():
                self._take(one, result, progress)
            if time.monotonic() >= self._last:
                for one in self._waiting:
                    self._results[one.position] = Failure(f"its turn did not come within {self._limit:g} s")
                self._waiting.clear()
        self.clock.run(False)
        self._done.set()

    def _ready(self, now: float) -> list[_Call]:
        return [one for one in self._waiting if one.begin <= now][: max(self.concurrency - len(self._running), 0)]

    def _outcomes(self) -> list[tuple[_Call, Any]]:
        """Wait for the next event, and return which calls have come to an end by it."""
        now = time.monotonic()
        moments = [deadline for deadline, _ in self._running.values()]
        if len(self._running) < self.concurrency:
            moments += [one.begin for one in self._waiting if one.begin > now]
        soonest = min(moments, default=None)
        try:
            event = self._events.get(timeout=None if soonest is None else max(soonest - now, 0.0))
        except queue.Empty:
            return self._late()
        return self._taken(*event)

    def _taken(self, kind: str, one: Any, value: Any) -> list[tuple[_Call, Any]]:
        if kind == "done":
            return [(one, value)]
        if kind == "add":
            self._calls.update(one)
            self._waiting += [_Call(0.0, position, 0) for position in one]
        else:
            self._over, self._last, self._limit = True, one, value
            self._running = {call: (min(end, one), cancel) for call, (end, cancel) in self._running.items()}
        return []

    def _late(self) -> list[tuple[_Call, Any]]:
        now = time.monotonic()
        late = [(one, cancel) for one, (deadline, cancel) in self._running.items() if deadline <= now]
        for _, cancel in late:
            cancel()
        return [(one, Failure(f"not done within {min(self.timeout, self._limit):g} s")) for one, _ in late]

    def _take(self, one: _Call, result: Any, progress: Callable[[int, int], None] | None) -> None:
        if self._running.pop(one, None) is None:  # it was late, and has come after all
            return
        now = time.monotonic()
        if isinstance(result, Failure) and one.attempt < self.retries and now < self._last:
            self._waiting.append(_Call(now + FIRST_PAUSE * 2**one.attempt, one.position, one.attempt + 1))
            return
        self._results[one.position] = result
        if progress is not None:
            progress(len(self._results), self._count)


class Clock:
    """The seconds in which something was under way.

    >>> clock = Clock()
    >>> clock.run(False)
    >>> clock.seconds
    0.0
    """

    def __init__(self) -> None:
        self._whole, self._since = 0.0, None

    def run(self, under_way: bool) -> None:
        """Go on, or stand still."""
        now, since = time.monotonic(), self._since
        if under_way and since is None:
            self._since = now
        elif not under_way and since is not None:
            self._whole, self._since = self._whole + now - since, None

    @property
    def seconds(self) -> float:
        """So far."""
        since = self._since
        return self._whole + (0.0 if since is None else time.monotonic() - since)


def gather(
    calls: Sequence[Callable[[], Any]],
    concurrency: int,
    timeout: float,
    retries: int = 0,
    progress: Callable[[int, int], None] | None = None,
    limit: float = float("inf"),
) -> list[Any]:
    """Return what the calls return, in order; a `Failure` for each that raised or was late to the last.

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
    one = Gathering(concurrency, timeout, retries)
    one.add(dict(enumerate(calls)))
    one.finish(limit)
    one.work(progress)
    return one.results()


def _start(
    call: Callable[[], Any], one: _Call, events: "queue.SimpleQueue[tuple[str, Any, Any]]"
) -> Callable[[], None]:
    """Begin a call, and return what gives it up."""
    pending: list[Any] = []
    given_up = threading.Event()

    def run() -> None:
        try:
            result = call()
            if inspect.isawaitable(result):
                future = asyncio.run_coroutine_threadsafe(_awaited(result), _loop())
                pending.append(future)
                if given_up.is_set():
                    future.cancel()
                future.add_done_callback(lambda future: events.put(("done", one, _outcome(future))))
                return
            result = _whole(result)
        except BaseException as error:
            result = failure(error)
        events.put(("done", one, result))

    def give_up() -> None:
        given_up.set()
        for future in pending:
            future.cancel()

    threading.Thread(target=run, name="reward call", daemon=True).start()
    return give_up


def _whole(result: Any) -> Any:
    """Return what a function yields as a list, what it returns as it is."""
    return list(result) if inspect.isgenerator(result) else result


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


_one_at_a_time = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's rewards; it stays open, so that a client may live longer than a call."""
    with _one_at_a_time:  # the first calls come from several threads, which would make a loop each
        return _made_loop()


@cache
def _made_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward loop", daemon=True).start()
    return loop


def awaited(result: Any, timeout: float) -> Any:
    """Return what is to be awaited, from the rewards' event loop; what is yielded as a list, all else as it is.

    Raises:
        TimeoutError: it is late; it is cancelled.
    """
    if not inspect.isawaitable(result):
        return _whole(result)
    future = asyncio.run_coroutine_threadsafe(_awaited(result), _loop())
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():  # the function's own
            raise
        raise TimeoutError(f"not done within {timeout:g} s") from None
    finally:
        future.cancel()
