"""Function calls in processes that can be killed.

Each worker is a fresh interpreter, started on first use. It neither forks this process (CUDA would not survive it) nor
imports the user's main script again (as `multiprocessing`'s spawn does), and it starts in the time of its imports.
Calls and results are lines of JSON over its pipes; a worker that is late is killed, and the next call gets a new one.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

START_SECONDS = 60.0
"""Limit for a worker's start, which imports a computer algebra system from a possibly cold disk."""
MEMORY_BYTES = 2 << 30
"""Address space of a worker: a comparison needs some 100 MB; what asks for more is an attack."""
MAX_STILLBORN = 3
"""Workers of one batch that may die before they are ready, until it is taken for more than bad luck."""
_CODE = "import sys, json; sys.path[:0] = json.loads(sys.argv[1]); from lit_qrl.rewards.workers import serve; serve()"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result: it was late, it raised, or its worker died."""

    reason: str


class WorkerStartError(RuntimeError):
    """Workers cannot work at all on this machine."""


class _Worker:
    def __init__(self, function: str, limit: float) -> None:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, path, function, str(limit), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.buffer = b""
        self.job: int | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self.ready = False

    @property
    def is_busy(self) -> bool:
        """Whether an answer, or the sign that it has started, is awaited."""
        return self.job is not None or not self.ready

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def send(self, position: int, arguments: Sequence[Any], timeout: float) -> bool:
        """Give the worker a call; False when it is gone."""
        assert self.process.stdin is not None
        self.job, self.deadline = position, time.monotonic() + timeout
        try:
            self.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the answers that have arrived; None among them when the worker is gone."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        if not chunk:
            return [None]
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """Calls one function in several processes, each call under a time limit.

    Args:
        function: `package.module:name`; its arguments and result must be JSON.
        size: number of workers; they start when there is work for them.
        timeout: seconds for one call.

    >>> pool = WorkerPool("math:gcd", size=1)
    >>> pool.map([(12, 18), (7, 5)])
    [6, 1]
    >>> pool.close()
    """

    def __init__(self, function: str, size: int = 1, timeout: float = 2.0) -> None:
        self.function, self.size, self.timeout = function, size, timeout
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, self._owner)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are alive."""
        return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Return each call's result, or a `Failure`, in order."""
        with self._lock:
            if os.getpid() != self._owner:  # the pipes belong to the process that this one was forked from
                self._workers.clear()
                self._owner = os.getpid()
                self._finalizer.detach()
                self._finalizer = weakref.finalize(self, _kill_all, self._workers, self._owner)
            try:
                return self._map(calls)
            except BaseException:  # an interrupt: answers still to come would be taken for those of later calls
                _kill_all(self._workers, self._owner)
                raise

    def _map(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        results: list[Any] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        stillborn = killed = 0
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            worker.kill()
            self._workers.remove(worker)
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)

            def drop(worker: _Worker, reason: str) -> None:
                nonlocal stillborn, killed
                if worker.job is not None:
                    results[worker.job] = Failure(reason)
                stillborn, killed = stillborn + (not worker.ready), killed + 1
                selector.unregister(worker.output)
                worker.kill()
                self._workers.remove(worker)
                if stillborn == MAX_STILLBORN:
                    raise WorkerStartError(f"A worker for {self.function} does not start: {reason}")

            def take(worker: _Worker, answer: Any) -> None:
                if answer is None:
                    drop(worker, "the worker died, perhaps for want of memory")
                elif not worker.ready:
                    if answer != "ready":
                        raise WorkerStartError(f"A worker for {self.function} cannot start: {answer['error']}")
                    worker.ready = True
                elif worker.job is not None:
                    results[worker.job] = answer["ok"] if "ok" in answer else Failure(answer["error"])
                    worker.job = None

            while waiting or any(worker.job is not None for worker in self._workers):
                free = [worker for worker in self._workers if worker.job is None]
                for _ in range(min(self.size - len(self._workers), len(waiting) - len(free))):
                    self._workers.append(_Worker(self.function, self.timeout))
                    selector.register(self._workers[-1].output, selectors.EVENT_READ, self._workers[-1])
                for worker in free:
                    if waiting and worker.ready:
                        position = waiting.popleft()
                        if not worker.send(position, calls[position], self.timeout):
                            drop(worker, "the worker died")
                soonest = min((worker.deadline for worker in self._workers if worker.is_busy), default=0.0)
                for key, _ in selector.select(max(0.0, soonest - time.monotonic())):
                    for answer in key.data.receive():
                        take(key.data, answer)
                now = time.monotonic()
                for worker in [worker for worker in self._workers if worker.is_busy and worker.deadline <= now]:
                    limit = self.timeout if worker.ready else START_SECONDS
                    drop(worker, f"not done within {limit:g} s")
        if killed:  # their successors warm up until the next call
            while len(self._workers) < min(self.size, killed):
                self._workers.append(_Worker(self.function, self.timeout))
        return results

    def close(self) -> None:
        """Kill all workers; a later call starts new ones."""
        with self._lock:
            _kill_all(self._workers, self._owner)

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self.function, "size": self.size, "timeout": self.timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WorkerPool.__init__(self, **state)


def _kill_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:
        for worker in workers:
            worker.kill()
    workers.clear()


def serve() -> None:
    """Answer calls from stdin until it is closed: what a worker runs."""
    import importlib
    import signal

    _, _, function, limit, memory = sys.argv
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it kills us
    try:
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
        prepare = getattr(sys.modules[module], "prepare_worker", lambda: None)
        prepare()  # imports, which the confined worker may not
        confine(int(memory))
        prepare()  # works confined
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    answers.write(b'"ready"\n')
    for line in sys.stdin.buffer:
        # Should the parent be gone when we are stuck, the alarm's default action ends us.
        signal.setitimer(signal.ITIMER_REAL, 2 * float(limit) + 1)
        try:
            answer: dict[str, Any] = {"ok": call(*json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer).encode() + b"\n")


def _is_generated(source: Any) -> bool:
    return source is None or (isinstance(source, bytes) and source.startswith(b"def monomial_"))


def confine(memory: int) -> None:
    """Limit this process's memory and forbid it to evaluate source text, start programs, or open connections.

    The one exception is SymPy's arithmetic of monomials, which it writes itself, from the number of variables alone.
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile" and str(arguments[1]).startswith("<") and not _is_generated(arguments[0]):
            raise PermissionError("A worker evaluates no source text.")
        if event in ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect"):
            raise PermissionError(f"A worker must not call {event}.")
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            raise PermissionError("A worker writes no files.")

    sys.addaudithook(refuse)
