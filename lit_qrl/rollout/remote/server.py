"""The process of an engine: it serves one run at a time, and holds that run's engine."""

import argparse
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from lit_qrl.receipts.clock import Clock
from lit_qrl.receipts.ledger import read_receipts
from lit_qrl.rollout.engine import OutlinedPolicy, RolloutEngine
from lit_qrl.rollout.remote.blueprint import Blueprint
from lit_qrl.rollout.remote.dialogue import AskedDialogue
from lit_qrl.rollout.remote.duplex import Duplex
from lit_qrl.rollout.remote.group import Backend, Group, join, local_address
from lit_qrl.rollout.remote.staging import HalfSentError, Staging
from lit_qrl.rollout.remote.transfer import Hold, Mapped, Named, sees, unpack
from lit_qrl.rollout.remote.wire import RefusedClientError, admit, listen
from lit_qrl.rollout.vllm.folder import remove_all

log = logging.getLogger(__name__)

PROGRESS = 0.5
"""Seconds between two words on how far a generation is."""
CALLS = ("validate", "check_routes", "generate", "converse", "score", "estimate", "read_back", "read_columns")
"""Methods of an engine that a run may call as they are."""
PUBLISHES = ("load_weights", "load_adapter", "perturb")


class Session:
    """One run's use of this process, from its first word to its last.

    Args:
        connection: to the run, which was admitted.
        device: where the engine computes.
    """

    def __init__(self, connection: Any, device: torch.device) -> None:
        self.device = device
        self.engine: RolloutEngine | None = None
        self._mapped, self._group = Mapped(), None
        self._staging, self._clock = Staging(device), Clock()
        self._steps: int | None = None
        self._stops: list[int] = []
        self.connection = Duplex(connection, self._beside)

    def run(self) -> None:
        """Serve until the run is over, or gone; then nothing of its engine is left."""
        try:
            while True:
                self._serve(*self._receive())
        except (EOFError, OSError) as error:
            log.info("The run is over: %s.", type(error).__name__)
        except Exception:  # what it sent cannot be read here, such as an object of a class that only the run has
            log.exception("The run is given up.")
        finally:
            self._close()
            self.connection.hang_up()

    def _receive(self) -> Any:
        return self.connection.receive()

    def _send(self, *message: Any) -> None:
        self.connection.send(message)

    def _serve(self, number: int, what: str, args: tuple[Any, ...]) -> None:
        if what == "pause":
            self._pause()
            return
        publishes = what in PUBLISHES
        self._ended = not publishes
        try:
            if publishes:
                value = self._publish(what, self._stream(number), args)
            elif what == "take":
                staging, chunks, taking, *rest = args
                value = self._publish(taking, self._staging.stream(staging, chunks), rest)
            else:
                value = self._call(number, what, args)
        except Exception as error:
            self._send("error", number, portable(error))
        else:
            self._send("answer", number, value)
        with suppress(HalfSentError):
            while not self._ended:  # what the sender had sent before it heard of the error
                self._next(number)

    def _call(self, number: int, what: str, args: tuple[Any, ...]) -> Any:
        if what == "open":
            self._close()
            self.engine = pickle.loads(args[0])
            return sees(args[1])
        engine: Any = self.engine
        if what == "close":
            return self._close()
        if what == "join":
            return self._join(*args)
        if what == "check_model":
            return engine.check_model(args[0].network)
        if what == "setup":
            spec, model = args
            assert isinstance(model, Blueprint)
            engine.setup(spec, OutlinedPolicy(model.network, self.device))
            return engine.plain_dtype
        if what == "read_receipts":
            return read_receipts(engine.read_back, *args)
        if what not in CALLS:
            raise ValueError(f"{what!r} is nothing that a run may ask of an engine.")
        if what == "generate":
            if engine.takes_in_flight:
                engine.between_steps = self._between_steps
            prompts, n, seed, sampling, positions, hand_out, stops = args
            options: dict[str, Any] = {"positions": positions}
            if hand_out:
                options["finished"] = self._handing(number)
            self._steps, self._stops = 0, list(stops)
            try:
                return engine.generate(prompts, n, seed, self._progress(number), sampling, **options)
            finally:
                self._steps = None
        if what == "converse":
            return engine.converse(AskedDialogue(self, number), *args)
        return getattr(engine, what)(*args)

    def _between_steps(self) -> None:
        """Stand still where the run asks for it, or asked for as it began; count the steps of a draw."""
        while self._steps is not None and self._stops[:1] == [self._steps]:
            self._stops.pop(0)
            self._pause()
        while self.connection.poll(0):
            self._serve(*self._receive())
        if self._steps is not None:
            self._steps += 1

    def _pause(self) -> None:
        """Serve what the run asks, publishes above all, until it lets the engine go on."""
        steps, self._steps = self._steps, None  # what is asked meanwhile may step the engine, too
        self._send("paused", 0, steps)
        while True:
            number, what, args = self._receive()
            if what == "resume":
                self._steps = steps
                return
            self._serve(number, what, args)

    def _join(self, meeting: tuple[str, int, str], rank: int, size: int, backend: Backend) -> None:
        self._leave()
        self._group: Group | None = Group(join(*meeting), rank, size, backend, local_address(self.connection))

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _progress(self, number: int) -> Any:
        told = time.monotonic()

        def tell(done: int, tokens: int) -> None:
            nonlocal told
            if time.monotonic() - told >= PROGRESS:
                told = time.monotonic()
                self._send("progress", number, (done, tokens))

        return tell

    def _handing(self, number: int) -> Any:
        return lambda drawn: self._send("drawn", number, drawn)

    def _publish(self, what: str, stream: Iterator[Named], args: Sequence[Any]) -> Any:
        if what not in PUBLISHES:
            raise ValueError(f"{what!r} takes no weights.")
        self._clock = Clock()
        with self._clock.part("load"):
            report = getattr(self.engine, what)(stream, *args)
            if report.received is not None:
                report.received.receipts()  # what they are made of stays here
        report.parts = dict(self._clock.seconds)
        return report

    def _stream(self, number: int) -> Iterator[Named]:
        while (chunk := self._next(number)) is not None:
            yield from chunk

    def _next(self, number: int) -> list[Named] | None:
        """Return the next chunk, acknowledged, or None at the end of the stream.

        Raises:
            HalfSentError: where the sender gave up.
        """
        with self._clock.part("wait"):
            kind, *rest = self._receive()
        if kind == "chunk":
            with self._clock.part("take"):
                packed, following = rest
                tensors = unpack(packed, following, self._mapped, self.device, self._group)
            self._send("taken", number, None)
            return tensors
        self._ended = True
        if kind == "abort":
            raise HalfSentError("The sender gave up in the middle of a publish.")
        return None

    def _beside(self, message: Any) -> None:
        """Hold weights that come while the engine draws; the thread that reads the connection calls it."""
        kind, number, *rest = message
        if kind == "staging":
            self._staging.begin(number)
            return

        def unpacked(hold: Hold) -> list[Named]:
            packed, following = rest
            return unpack(packed, following, self._mapped, self.device, self._group, hold)

        try:
            self._staging.take(number, unpacked)
        except Exception as error:
            told: tuple[Any, ...] = "unstaged", number, portable(error)
        else:
            told = "staged", number, None
        with suppress(OSError):  # whoever reads next hears that the run is gone
            self._send(*told)

    def _close(self) -> None:
        self._leave()
        self._staging.close()
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def portable(error: Exception) -> Exception:
    """Return an error that can be raised in another process, with a note that says where it came from."""
    told = "".join(traceback.format_exception(error)).rstrip()
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        again = RuntimeError(f"{type(error).__name__}: {error}")
    again.add_note(f"In the engine's process:\n{told}")
    return again


def serve(listener: socket.socket, token: bytes, device: torch.device, once: bool = False) -> None:
    """Serve runs one after the other.

    Args:
        listener: a listening socket.
        token: that a run must know.
        device: where engines compute.
        once: end with the first run.
    """
    while True:
        accepted, (host, *_) = listener.accept()
        try:
            connection = admit(accepted, token)
        except RefusedClientError as error:
            log.warning("A client of %s was refused: %s.", host, error)
            continue
        Session(connection, device).run()
        if once:
            return


def use(name: str) -> torch.device:
    """Return the device of a name, which is from now on this process's own.

    >>> use("cpu")
    device(type='cpu')
    """
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def main() -> None:
    """Serve the run that started this process: the token comes over standard input, the port goes back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = use(parser.parse_args().device)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for engines of the user's own
    token = sys.stdin.buffer.readline().strip()
    listener = listen("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    os.dup2(2, 1)  # libraries' words go where the run's own go
    threading.Thread(target=_end_with_parent, daemon=True).start()
    serve(listener, token, device, once=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    with suppress(Exception):
        remove_all()  # what runs at the end of a process does not run here
    os._exit(0)


if __name__ == "__main__":
    # Errors are raised in the run, too, which has their classes by this module's name and none of `__main__`.
    from lit_qrl.rollout.remote import server

    server.main()
