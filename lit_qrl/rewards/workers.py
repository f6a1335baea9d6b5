"""Function calls in processes that can be killed.

Each worker is a fresh interpreter, started on first use. It neither forks this process (CUDA would not survive it) nor
imports the user's main script again (as `multiprocessing`'s spawn does), and it starts in the time of its imports.
Calls and results are lines of JSON over its pipes; a worker that is late is killed, and the next call gets a new one.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

START_SECONDS = 60.0
"""Limit for a worker's start, which imports a computer algebra system from a possibly cold disk."""
MEMORY_BYTES = 2 << 30
"""Address space of a worker: a comparison needs some 100 MB; what asks for more is an attack."""
MAX_STILLBORN = 3
"""Workers that may die one after another before they are ready, until it is taken for more than bad luck."""
_CODE = "import sys, json; sys.path[:0] = json.loads(sys.argv[1]); from lit_qrl.rewards.workers import serve; serve()"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result: it was late, it raised, or its worker died."""

    reason: str


class WorkerStartError(RuntimeError):
    """Workers cannot work at all on this machine."""


class _Worker:
    """One process, which a thread calls and waits for.

    Args:
        function: that it calls.
        timeout: seconds for a call.
    """

    def __init__(self, function: str, timeout: float) -> None:
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, path, function, str(timeout), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.function, self.timeout, self._rest = function, timeout, b""

    def start(self) -> Failure | None:
        """Wait until it is ready; return why it died before.

        Raises:
            WorkerStartError: for a function that no worker can call.
        """
        answer = self._answer(START_SECONDS)
        if isinstance(answer, dict):
            raise WorkerStartError(f"A worker for {self.function} cannot start: {answer['error']}")
        return answer if isinstance(answer, Failure) else None

    def call(self, arguments: Sequence[Any]) -> Any:
        """Return the result of a call, or a `Failure`; of one that is late or dies the process is gone."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
        except OSError:
            self.kill()
            return Failure("the worker died")
        answer = self._answer(self.timeout)
        return answer if isinstance(answer, Failure) else answer["ok"] if "ok" in answer else Failure(answer["error"])

    def _answer(self, seconds: float) -> Any:
        """Return the next line of the worker, or why there is none."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            chunk = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                self.kill()
                return Failure(
                    "the worker died, perhaps for want of memory" if ready else f"not done within {seconds:g} s"
                )
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


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
        return [worker.process.pid for worker in self._workers if worker.lives]

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Return each call's result, or a `Failure`, in order.

        Raises:
            WorkerStartError: no worker starts.
        """
        with self._lock:
            if os.getpid() != self._owner:  # the pipes belong to the process that this one was forked from
                self._finalizer.detach()
                WorkerPool.__init__(self, self.function, self.size, self.timeout)
                return self.map(calls)
            for worker in [worker for worker in self._workers if not worker.lives]:  # killed since
                worker.kill()
                self._workers.remove(worker)
            if not calls:
                return []
            stopped, free = threading.Event(), self._workers[:]
            executor = ThreadPoolExecutor(min(self.size, len(calls)), "reward worker")
            try:
                return list(executor.map(lambda arguments: self._call(arguments, free, stopped), calls))
            except BaseException:  # an interrupt: answers still to come would be taken for those of later calls
                stopped.set()
                _kill_all(self._workers, self._owner)
                raise
            finally:
                executor.shutdown(cancel_futures=True)
                if stopped.is_set():  # what a thread had begun to start
                    _kill_all(self._workers, self._owner)

    def _call(self, arguments: Sequence[Any], free: list[_Worker], stopped: threading.Event) -> Any:
        """Return a call's result, by a worker that is free or a new one."""
        died = Failure("")
        for _ in range(MAX_STILLBORN):
            if stopped.is_set():
                return died
            try:
                worker = free.pop()
            except IndexError:
                worker = _Worker(self.function, self.timeout)
                self._workers.append(worker)
                if (failed := worker.start()) is not None:
                    self._workers.remove(worker)
                    died = failed
                    continue
            result = worker.call(arguments)
            if worker.lives:
                free.append(worker)
            else:
                self._workers.remove(worker)
            return result
        raise WorkerStartError(f"A worker for {self.function} does not start: {died.reason}")

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
