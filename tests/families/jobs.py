"""Work in processes of one thread side by side, each a copy of this one that takes down nothing else when it dies."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

LATE = "not through in time"


class Piece(NamedTuple):
    """What came of a piece of work: something that it gave, or, as the last, how it ended.

    Args:
        key: of the work.
        given: what it gave; None at its end.
        ended: at its end, an empty string, or what stopped it before it was through: a signal, or `LATE`.
    """

    key: Any
    given: Any = None
    ended: str | None = None


def side_by_side(
    tasks: Iterable[tuple[Any, Callable[[Callable[[Any], None]], None]]], jobs: int, seconds: float = float("inf")
) -> Iterator[Piece]:
    """Yield what tasks give as they give it, and for each that was begun its end.

    Args:
        tasks: key, and a function that is given where to send what it finds.
        jobs: processes at a time.
        seconds: after which none is begun any more, and those that run are stopped.
    """
    fork = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[Any, Any]] = {}
    waiting, deadline = iter(tasks), time.monotonic() + seconds

    def begin() -> bool:
        task = next(waiting, None) if time.monotonic() < deadline else None
        if task is not None:
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(task[1], there))
            process.start()
            there.close()
            running[here] = task[0], process
        return task is not None

    try:
        while True:
            while len(running) < jobs and begin():
                pass
            if not running:
                return
            left = deadline - time.monotonic()
            ready: list[Any] = wait(list(running), None if left == float("inf") else max(left, 0.0))
            for pipe in ready:
                key, process = running[pipe]
                try:
                    yield Piece(key, pipe.recv())
                except EOFError:
                    process.join()
                    del running[pipe]
                    yield Piece(key, ended=_how(process.exitcode))
            if not ready:
                for key, _ in running.values():
                    yield Piece(key, ended=LATE)
                return
    finally:
        for _, process in running.values():
            _stop(process)


def _work(task: Callable[[Callable[[Any], None]], None], pipe: Connection) -> None:
    os.setsid()  # so that what it starts can be stopped with it
    torch.set_num_threads(1)
    task(pipe.send)
    pipe.close()


def _how(exitcode: int | None) -> str:
    if not exitcode:
        return ""
    return f"ended by signal {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with status {exitcode}"


def _stop(process: Any) -> None:
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            process.kill()
        process.join()
