"""Calls in processes of their own, which can be killed: the only limit that holds whatever the called code does.

A server, a fresh interpreter that has imported the function, forks a worker for each call that is under way. So nothing
forks this process (CUDA would not survive it) or imports the user's main script again (as the spawn and the forkserver
of `multiprocessing` do). Calls go out pickled, and results come back as JSON: no result can run code here.
"""

import contextlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.limit import in_this_process

START_SECONDS = 60.0
"""Limit for a server's start, which imports a computer algebra system from a possibly cold disk."""
LONGEST = 1e6
"""Seconds that a system call may wait."""
MEMORY_BYTES = 2 << 30
"""Address space of a confined worker: a comparison needs some 100 MB; what asks for more is an attack."""
MAX_STILLBORN = 3
"""Workers that may die one after another before they are ready, until it is taken for more than bad luck."""
_CODE = "import sys, json; sys.path[:0] = json.loads(sys.argv[1]); from lit_qrl.rewards.workers import serve; serve()"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result: it was late, it raised, or its worker died."""

    reason: str
    late: bool = field(default=False, compare=False)

    def __call__(self) -> Exception:
        """Return it as an error."""
        return (TimeoutError if self.late else RuntimeError)(self.reason)


class WorkerStartError(ConfigError):
    """Workers cannot work at all on this machine."""


def by_name(function: Any) -> bool:
    """Return True for a plain function, not `async`, that another process can import.

    >>> by_name(by_name), by_name(lambda: 1)
    (True, False)
    """
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        return False
    return sent(function) is not None


def sent(function: Any) -> bytes | None:
    """Return what another process makes a function or an object of; None where it is not to be had there."""
    try:
        pickled = pickle.dumps(function)
    except Exception:  # of as many kinds as there are objects
        return None
    return None if b"__main__" in pickled else pickled


class _Peer:
    """The other end of a pipe: a server, or a worker of it."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.pid = pipe, 0

    def ask(self, message: bytes | None, seconds: float) -> Any:
        """Return the answer to a message, or to none the first word; a `Failure` where there is none in time."""
        try:
            if message is not None:
                self.pipe.send_bytes(message)
            if self.pipe.poll(min(seconds, LONGEST)):
                answer = json.loads(self.pipe.recv_bytes())
                return answer["ok"] if "ok" in answer else Failure(answer["error"])
            self.kill()
            return Failure(f"not done within {seconds:g} s", late=True)
        except (EOFError, OSError):
            self.pipe.close()
            return Failure("the worker died, perhaps for want of memory")
        except BaseException:  # an interrupt: the answer still to come would be taken for that of a later call
            self.kill()
            raise

    @property
    def lives(self) -> bool:
        """Whether it waits for a call: one that is dead has something to say, which is nothing."""
        return not self.pipe.closed and not self.pipe.poll(0)

    def kill(self) -> None:
        """End the process, which is alive."""
        with contextlib.suppress(OSError):
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
                self.pipe.poll(0.25)  # until it is gone, which is not worth more of the caller's time
        self.pipe.close()


class WorkerPool:
    """Calls a function in processes, each call under a time limit; any thread may call.

    Args:
        function: what pickle knows by its name, or an object that can be called.
        size: calls at the same time of `map`; a worker starts when a call finds none that is free.
        timeout: seconds for one call.
        confined: limits memory and forbids what `confine` lists.

    >>> import math
    >>> pool = WorkerPool(math.gcd)
    >>> pool.map([(12, 18), (7, 5)])
    [6, 1]
    >>> pool.close()
    """

    def __init__(
        self, function: Callable[..., Any], size: int = 1, timeout: float = 2.0, confined: bool = False
    ) -> None:
        self.function, self.size, self.timeout, self.confined = function, size, timeout, confined
        self._idle: list[_Peer] = []
        self._servers: list[tuple[subprocess.Popen[bytes], _Peer]] = []  # one, or none yet
        self._lock, self._owner = threading.RLock(), os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._servers, self._idle, self._owner)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that wait for a call."""
        return [worker.pid for worker in self._idle if worker.lives]

    def start(self) -> None:
        """Have the server import the function, unless it has.

        Raises:
            WorkerStartError: it cannot.
        """
        with self._lock:
            if os.getpid() != self._owner:  # the pipes belong to the process that this one was forked from
                self._finalizer.detach()
                self.__setstate__(self.__getstate__())
            if self._servers and self._servers[0][1].lives:
                return
            result = Failure("")
            for _ in range(MAX_STILLBORN):
                self.close()
                process, server = _served(self.confined)
                self._servers.append((process, server))
                result = server.ask(sent(self.function) or b"", START_SECONDS)
                if not isinstance(result, Failure):
                    return
                if not server.pipe.closed:  # it lives, and says why it does not work
                    break
            self.close()
            raise self._no_start(result)

    def call(self, *arguments: Any) -> Any:
        """Return the result of one call, or a `Failure`.

        Raises:
            WorkerStartError: no worker starts.
        """
        try:
            message = pickle.dumps(arguments)
        except Exception as error:
            return Failure(f"its arguments cannot go to another process: {type(error).__name__}: {str(error)[:200]}")
        worker = self._worker()
        result = worker.ask(message, self.timeout)
        with self._lock:
            if not worker.pipe.closed:
                self._idle.append(worker)
        return result

    def _worker(self) -> _Peer:
        """Return one that is free, or a new one."""
        with self._lock:
            ready: Any = Failure("")
            for _ in range(MAX_STILLBORN):
                self.start()
                while self._idle:
                    if (worker := self._idle.pop()).lives:
                        return worker
                    worker.pipe.close()
                ours, theirs = Pipe()
                with theirs, contextlib.suppress(OSError):
                    send_handle(self._servers[0][1].pipe, theirs.fileno(), None)
                worker = _Peer(ours)
                ready = worker.ask(None, START_SECONDS)
                if not isinstance(ready, Failure):
                    worker.pid = ready
                    return worker
        raise self._no_start(ready)

    def _no_start(self, failure: Failure) -> WorkerStartError:
        remedy = "Reinstall lit-qrl's dependencies" if self.confined else "Correct it, or set `processes: false`"
        return WorkerStartError(
            f"A worker for {_name(self.function)} does not start.",
            expected="a module that another process can import",
            given=failure.reason,
            remedy=f"{remedy}; or free memory and processes.",
        )

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Return each call's result, or a `Failure`, in order.

        Raises:
            WorkerStartError: no worker starts.
        """
        if not calls:
            return []
        executor = ThreadPoolExecutor(min(self.size, len(calls)), "reward worker")
        try:
            return list(executor.map(lambda arguments: self.call(*arguments), calls))
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            executor.shutdown()

    def close(self) -> None:
        """Kill all workers; a later call starts new ones."""
        with self._lock:
            _end(self._servers, self._idle, self._owner)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("function", "size", "timeout", "confined")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        WorkerPool.__init__(self, **state)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _served(confined: bool) -> tuple["subprocess.Popen[bytes]", _Peer]:
    """Return a server that begins to start, at the head of a process group with its workers."""
    ours, theirs = Pipe()
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, path, str(theirs.fileno()), str(int(confined))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if confined else None,
            stderr=subprocess.DEVNULL if confined else None,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the parent's, which ends us all
        )
    return process, _Peer(ours)


def _end(servers: list[tuple["subprocess.Popen[bytes]", _Peer]], idle: list[_Peer], owner: int) -> None:
    if os.getpid() == owner:
        for process, server in servers:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            server.pipe.close()
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.pipe.poll(1.0)  # until it is gone
            worker.pipe.close()
    servers.clear()
    idle.clear()


def serve() -> None:
    """Fork workers until the parent is gone, and end with all of them: what a server runs."""
    _, _, descriptor, confined = sys.argv
    parent = Connection(int(descriptor))
    try:
        function = pickle.loads(parent.recv_bytes())
        prepare = getattr(sys.modules.get(function.__module__), "prepare_worker", lambda: None)
        prepare()  # imports, which a confined worker may not
    except BaseException as error:
        parent.send_bytes(_answer("error", _told(error)))
        parent.poll(None)
        return
    parent.send_bytes(_answer("ok", None))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    while True:
        try:
            handle = recv_handle(parent)
        except BaseException:
            os.killpg(0, signal.SIGKILL)
            raise
        if os.fork() == 0:
            parent.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _work(Connection(handle), function, prepare if confined == "1" else None)
        os.close(handle)


def _work(parent: Connection, function: Callable[..., Any], prepare: Callable[[], None] | None) -> None:
    """Answer calls until the pipe is closed: what a worker runs, whose process ends here."""
    message = b""
    try:
        if prepare is not None:
            confine(MEMORY_BYTES)
            prepare()  # works confined
        parent.send_bytes(_answer("ok", os.getpid()))
        while True:
            message = parent.recv_bytes()
            try:
                answer = _answer("ok", in_this_process(function, *pickle.loads(message)))
            except BaseException as error:
                answer = _answer("error", _told(error))
            parent.send_bytes(answer)
    except Exception as error:
        if not message:
            parent.send_bytes(_answer("error", _told(error)))
    finally:
        os._exit(0)


def _answer(kind: str, value: Any) -> bytes:
    return json.dumps({kind: value}, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Return a number or an array of any library as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else float(value)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_REFUSED = ("os.", "socket.", "ctypes.", "subprocess.", "shutil.", "mmap.", "pty.", "signal.", "resource.", "code.")
_IMPORTS = ("os.listdir", "os.scandir")


def _is_generated(source: Any) -> bool:
    return source is None or (isinstance(source, bytes) and source.startswith(b"def monomial_"))


def confine(memory: int) -> None:
    """Limit this process's memory, and refuse Python code in it what an answer needs for harm.

    Refused are source text to evaluate, opening files but to read them, every audited function of `os` but listing a
    folder, and those of `socket`, `ctypes`, `subprocess`, `shutil`, `mmap` and `signal`; the system lets no file grow
    and, but for root, no process start. It may read files and use a core until it is late. It is no sandbox for native
    code: a fault in a C library that an answer can use is out of its reach, but for those limits of the system.
    The one exception is SymPy's arithmetic of monomials, which it writes itself, from the number of variables alone.

    Args:
        memory: bytes of address space.
    """
    import resource

    limits = [(resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0)]
    for limit, most in [*limits, (resource.RLIMIT_AS, memory)] if sys.platform == "linux" else limits:
        hard = resource.getrlimit(limit)[1]
        most = most if hard < 0 else min(most, hard)
        resource.setrlimit(limit, (most, most))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "compile" and str(arguments[1]).startswith("<") and not _is_generated(arguments[0]):
            raise PermissionError("A worker evaluates no source text.")
        if event.startswith(_REFUSED) and event not in _IMPORTS:
            raise PermissionError(f"A worker must not call {event}.")
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            raise PermissionError("A worker opens no file for writing.")

    sys.addaudithook(refuse)
