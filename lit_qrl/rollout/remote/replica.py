"""One engine in another process, as the run sees it: started or found, asked, published to, and started again."""

import os
import pickle
import secrets
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import Dialogue, EngineDiedError, Finished, RolloutEngine
from lit_qrl.rollout.pauses import Stand
from lit_qrl.rollout.remote.dialogue import told
from lit_qrl.rollout.remote.group import local_address
from lit_qrl.rollout.remote.pausing import Pausing
from lit_qrl.rollout.remote.transfer import dumps, probe
from lit_qrl.rollout.remote.wire import connect, hang_up
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
        self._connection: Any = None
        self._number, self._opened = 0, False
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

    def open(self) -> None:
        """Connect, and give the server its engine.

        Raises:
            ConfigError: where there is no server that takes this run.
            EngineDiedError: where the process that was started does not come up.
        """
        if not self.dead:
            return
        self.start()
        host, _, port = (f"127.0.0.1:{self._port()}" if self.place.started else self.place.name).rpartition(":")
        try:
            self._connection = connect(host, int(port), self._token)
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
            raise self._died(f"it did not start within {START:g} s")
        return int(line)

    def restart(self) -> None:
        """End what is left, and start a new process at once where it is the run's."""
        self.close()
        self.start()

    def close(self) -> None:
        """End the connection and, where it is the run's, the process."""
        self.ready = False
        self._pausing.follow(None)
        connection, self._connection = self._connection, None
        if connection is not None:
            hang_up(connection)
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
        self._send("chunk", message)
        try:
            for piece in following:
                self._connection.send_bytes(piece)
        except OSError as error:
            raise self._died(str(error)) from error

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

    def _send(self, *message: Any) -> None:
        if self._connection is None:
            raise EngineDiedError(f"The engine at {self.place.name} is gone.")
        try:
            self._connection.send_bytes(dumps(message))
        except OSError as error:
            raise self._died(str(error)) from error

    def _receive(self) -> Any:
        if self._connection is None:
            raise EngineDiedError(f"The engine at {self.place.name} is gone.")
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died(type(error).__name__) from error

    def _died(self, why: str) -> EngineDiedError:
        self.ready = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is None:
            return EngineDiedError(f"The engine's server at {self.place.name} is gone: {why}")
        try:
            status: Any = self._process.wait(END)
        except subprocess.TimeoutExpired:
            status = "that it does not give"
        return EngineDiedError(f"The engine's process on {self.place.name} ended with status {status}: {why}")


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
