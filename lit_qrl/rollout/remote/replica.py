"""One engine in another process, as the run sees it: started or found, asked, published to, and started again."""

import os
import pickle
import secrets
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import Dialogue, EngineDiedError, Finished, RolloutEngine
from lit_qrl.rollout.pauses import Stand
from lit_qrl.rollout.remote import wire
from lit_qrl.rollout.remote.dialogue import told
from lit_qrl.rollout.remote.duplex import Duplex
from lit_qrl.rollout.remote.group import local_address
from lit_qrl.rollout.remote.pausing import Pausing
from lit_qrl.rollout.remote.transfer import probe
from lit_qrl.types import SamplingParams

COMMAND = (sys.executable, "-P", "-m", "lit_qrl.rollout.remote.server")
START = 180.0
"""Seconds in which a process must have imported what it needs."""
END = 5.0


@dataclass(frozen=True)
class Place:
    """Where an engine runs.

    Args:
        name: `cpu` or `cuda:1` for a process that the run starts, else `host:port` of a server.
        token: of that server.
    """

    name: str
    token: bytes = b""

    @property
    def started(self) -> bool:
        """True where the run starts the process itself."""
        return not self.token


class Replica:
    """A connection to one server; every call may raise `EngineDiedError`, after which `restart` and `open` begin anew.

    Args:
        place: of the server.
        engine: that it shall hold, as it was before its `setup`.
    """

    def __init__(self, place: Place, engine: RolloutEngine) -> None:
        self.place, self._engine = place, engine
        self.ready = False
        """True between `setup` and a death."""
        self.sees_memory = False
        self._process: subprocess.Popen[bytes] | None = None
        self._token = place.token
        self._connection: Duplex | None = None
        self._number, self._opened, self._staging = 0, False, 0
        self._starting = False
        """True from the start of a process until somebody asks for its connection."""
        self._ends = threading.RLock()  # of two threads that use it both may hear of a death
        self._cause = ""  # of the last death
        self._early: list[Any] = []
        self._pausing = Pausing()

    @property
    def dead(self) -> bool:
        """True when it has to be opened before it is asked."""
        return self._connection is None

    # ------------------------------------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Start the process, where it is the run's; it gets ready while the caller goes on."""
        if not self.place.started or self._process is not None:
            return
        self._token = secrets.token_hex(32).encode()
        environment = dict(os.environ)
        if self.place.name == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # A session of its own: Ctrl-C is the run's, which says when the engine ends.
        self._process = subprocess.Popen(
            [*COMMAND, "--device", self.place.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._token + b"\n")
        self._process.stdin.flush()
        self._starting = True

    def open(self) -> None:
        """Connect, and give the server its engine.

        Raises:
            ConfigError: where there is no server that takes this run.
            EngineDiedError: where the process that was started does not come up.
        """
        if not self.dead:
            return
        self.start()
        self._starting = False
        host, _, port = (f"127.0.0.1:{self._port()}" if self.place.started else self.place.name).rpartition(":")
        patience = wire.AGAIN if self._opened and not self.place.started else 0.0
        try:
            self._connection = Duplex(wire.connect(host, int(port), self._token, patience))
        except ConfigError as error:
            if self._opened:  # it was there, so the run can say more than that its settings are wrong
                raise EngineDiedError(str(error)) from error
            raise
        self._opened = True
        memory = probe()
        self.sees_memory = bool(self.call("open", _pickled(self._engine), memory.name))
        memory.close()

    def _port(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        line = b""
        if select.select([self._process.stdout], [], [], START)[0]:
            line = self._process.stdout.readline()
        if not line.strip():
            raise EngineDiedError(self._ended(f"it did not start within {START:g} s"))
        return int(line)

    def restart(self) -> None:
        """End what is left, and start a new process at once where it is the run's; again it changes nothing."""
        with self._ends:
            if not self._starting:
                self.close()
                self.start()

    def close(self) -> None:
        """End the connection and, where it is the run's, the process."""
        self.ready = self._starting = False
        self._pausing.follow(None)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.hang_up()
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # --------------------------------------------------------------------------------------------------------- asking

    def call(
        self,
        what: str,
        *args: Any,
        progress: Callable[[int, int], None] | None = None,
        finished: Finished | None = None,
    ) -> Any:
        """Return what the engine's method returns, or raise what it raises.

        Args:
            what: the method.
            *args: its arguments.
            progress: called while it draws.
            finished: called with completions that it hands out.
        """
        self.begin(what, *args)
        return self.answer(progress, finished)

    def draw(
        self, *args: Any, progress: Callable[[int, int], None] | None = None, finished: Finished | None = None
    ) -> Any:
        """Return what `call` returns of the engine's `generate`; another thread may `pause` it meanwhile."""
        outcome: list[tuple[str, Any]] = []
        rollout = args[2] if args[3] is None else None  # an evaluation has a sampling of its own
        stops = self._pausing.stops(rollout)
        self._pausing.begin(lambda: self.begin("generate", *args, stops), rollout)
        number = self._number  # which another thread changes in pauses alone
        try:
            while not outcome or not self._pausing.over():
                kind, of, value = self._receive()
                if kind == "paused":
                    self._pausing.hand_over(lambda: self._send(0, "resume", ()), value)
                elif of == number and kind == "progress":
                    if progress is not None:
                        progress(*value)
                elif of == number and kind == "drawn":
                    if finished is not None:
                        finished(value)
                elif of == number and kind in ("answer", "error"):
                    outcome.append((kind, value))
        finally:
            self._pausing.end()
        ((kind, value),) = outcome
        if kind == "error":
            raise value
        return value

    def want_pause(self) -> None:
        """Ask the engine to stand still at the end of its step; what is not begun waits."""
        self._pausing.want(lambda: self._send(0, "pause", ()))

    def await_pause(self) -> Stand:
        """Wait until it stands still, and return where; this thread may then ask it anything."""
        self._pausing.wait()
        return self._pausing.stand

    def follow(self, course: Sequence[Stand]) -> None:
        """Let it stand still at these places, instead of where it is asked to."""
        self._pausing.follow(course)

    def end_pause(self, whole: bool) -> None:
        """Let the engine go on; or, where the pause went wrong, end what it drew.

        Args:
            whole: it holds weights that it may draw with.
        """

        def tell() -> None:
            if whole:
                self._send(0, "resume", ())
            else:
                self.restart()

        self._pausing.release(tell)

    @property
    def connection(self) -> Any:
        """Another one after each start."""
        return self._connection

    @property
    def address(self) -> str:
        """This host's, as the replica's sees it."""
        return local_address(self._connection)

    def begin(self, what: str, *args: Any) -> None:
        """Ask without waiting for the answer."""
        self._number += 1
        self._early = []
        self._send(self._number, what, args)

    def answer(self, progress: Callable[[int, int], None] | None = None, finished: Finished | None = None) -> Any:
        """Return the answer of what was asked last; those of calls that were interrupted are passed over."""
        while not self._early:
            kind, number, value = self._receive()
            if number != self._number or kind == "taken":
                continue
            if kind == "progress":
                if progress is not None:
                    progress(*value)
            elif kind == "drawn":
                if finished is not None:
                    finished(value)
            elif kind == "error":
                raise value
            else:
                self._early = [value]
        return self._early.pop()

    def converse(self, dialogue: Dialogue, sampling: SamplingParams | None) -> None:
        """Let the engine draw a dialogue's turns, and answer what it asks of the dialogue."""
        self.begin("converse", sampling)
        broken: Exception | None = None
        while True:
            kind, number, value = self._receive()
            if number != self._number:
                continue
            if kind == "ask":
                try:
                    answer = ("told", told(dialogue, *value))
                except Exception as error:
                    broken, answer = error, ("gone",)
                self._send(*answer)
            elif kind == "answered" and broken is None:
                dialogue.answered(*value)
            elif kind in ("answer", "error"):
                break
        if broken is not None:
            raise broken
        if kind == "error":
            raise value

    def send_chunk(self, message: Any, following: Sequence[Any]) -> None:
        """Send a chunk of the publish that was begun."""
        self._send("chunk", message, following=following)

    def await_taken(self) -> None:
        """Wait until one more chunk was taken, or raise what the engine raised instead."""
        kind = ""
        while kind != "taken":
            kind, number, value = self._receive()
            if number != self._number:
                kind = ""
            elif kind == "error":
                self._send("abort")
                raise value
            elif kind == "answer":  # of an engine that did not read the stream to its end
                self._early = [value]

    def end(self, whole: bool) -> None:
        """End the stream: whole, or given up in the middle."""
        self._send("end" if whole else "abort")

    # ------------------------------------------------------------------------------- weights that come while it draws

    def begin_staging(self) -> None:
        """Let the chunks that follow wait beside the engine."""
        self._staging += 1
        self._send("staging", self._staging)

    def stage_chunk(self, message: Any, following: Sequence[Any]) -> None:
        """Send a chunk of them."""
        self._send("stage", self._staging, message, following=following)

    def await_staged(self) -> None:
        """Wait until one more chunk is there, or raise what the server raised instead."""
        while True:
            kind, number, value = self._receive(beside=True)
            if number == self._staging:
                break
        if kind == "unstaged":
            raise value

    def begin_taking(self, chunks: int, what: str, *args: Any) -> None:
        """Ask the engine, which stands still, to take what is there.

        Args:
            chunks: that were sent.
            what: the engine's method.
            *args: that follow the tensors.
        """
        self.begin("take", self._staging, chunks, what, *args)

    # ----------------------------------------------------------------------------------------------------- connection

    def _send(self, *message: Any, following: Sequence[Any] | None = None) -> None:
        connection = self._alive()
        try:
            connection.send(message, following)
        except OSError as error:
            raise self._died(connection, str(error)) from error

    def _receive(self, beside: bool = False) -> Any:
        connection = self._alive()
        try:
            return connection.receive(beside)
        except (EOFError, OSError) as error:
            raise self._died(connection, type(error).__name__) from error

    def _alive(self) -> Duplex:
        connection = self._connection
        if connection is None:
            with self._ends:  # whoever hears of it first finds out why
                raise EngineDiedError(self._cause or f"The engine at {self.place.name} is gone.")
        return connection

    def _died(self, connection: Duplex, why: str) -> EngineDiedError:
        with self._ends:
            if connection is self._connection:  # else another thread has heard of it
                self.ready, self._connection = False, None
                connection.hang_up()
                self._cause = self._ended(why)
            return EngineDiedError(self._cause)

    def _ended(self, why: str) -> str:
        if self._process is None:
            return f"The engine's server at {self.place.name} is gone: {why}"
        try:
            status: Any = self._process.wait(END)
        except subprocess.TimeoutExpired:
            status = "that it does not give"
        return f"The engine's process on {self.place.name} ended with status {status}: {why}"


def _pickled(engine: RolloutEngine) -> bytes:
    try:
        return pickle.dumps(engine)
    except Exception as error:
        raise ConfigError(
            f"{type(engine).__name__} cannot be sent to another process.",
            expected="an engine that `pickle` takes before its setup",
            given=f"{type(error).__name__}: {error}",
            remedy="Build what it needs in its setup.",
        ) from error
