"""Lets the processes of a run meet, and ends one when another is gone, instead of waiting for it for ever."""

import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer

from lit_qrl.errors import EXIT_CONFIG, EXIT_STOPPED, ConfigError, StoppedError, out_of_memory
from lit_qrl.run.config import flat
from lit_qrl.run.description import Described, describe
from lit_qrl.run.event_log import event
from lit_qrl.run.folder import last_checkpoint
from lit_qrl.run.interrupt import InterruptedTogether, Interruption
from lit_qrl.run.meeting import Meeting, gather_objects, several_processes
from lit_qrl.run.peers import MET, PeerWatch, check_same
from lit_qrl.run.stop import has_learned
from lit_qrl.strategies.settings import trainer_settings

EXIT_AGAIN = 75
"""Exit status of a run that nothing is wrong with: start it again."""
BROKEN = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|process ?group", re.IGNORECASE)
"""What a collective says when another process is gone."""


class Peers(Callback):
    """Meets the other processes of a run and watches them; `GRPOModule` adds it where there are several."""

    def __init__(self) -> None:
        self._watch = PeerWatch(self._gone, lambda number: self.on_signal(number))
        self.tell_signal = self._watch.tell_signal
        self.on_signal: Callable[[int], None] = self._note
        """Called in a thread of its own with the number of a signal that another process got."""
        self._trainer: Trainer | None = None
        self._meeting: Meeting | None = None

    def meet(self, trainer: Trainer) -> "Peers":
        """Return this one, when it has found the others and all were started with the same, before anything is loaded.

        Raises:
            ConfigError: when one does not come, the first cannot be reached, or settings differ.
        """
        self._trainer = trainer
        relieve_lightning()
        note_signals(trainer)
        rank, size, exchange = trainer.global_rank, trainer.world_size, gather_objects
        waiting = Interruption()
        waiting.install()  # an `Interrupted` has Lightning end those that this one started; the signal alone has not
        try:
            if not several_processes():
                place: Any = trainer.strategy.cluster_environment  # pyright: ignore[reportAttributeAccessIssue]
                self._meeting = Meeting(place.main_address, place.main_port, rank, size)
                exchange = self._meeting.exchange
            given = exchange(settings(trainer))
        finally:
            waiting.remove()
        MET.set()
        check_same(given)
        self._watch.start(rank, size, lambda own: exchange(own)[0])
        return self

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Part from the others."""
        self._watch.stop()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Tell the others; an error of a collective is one that a process which is gone has caused."""
        if isinstance(exception, InterruptedTogether):  # they end by the same
            self._watch.stop()
            return
        status = _status(trainer, exception)
        broken = not status and isinstance(exception, (RuntimeError, OSError))
        if broken and BROKEN.search(f"{type(exception)} {exception}"):
            self._watch.wait(10)
        told = isinstance(exception, (ConfigError, StoppedError))
        self._watch.fail(str(exception) if told else f"{type(exception).__name__}: {exception}", status)
        self._watch.stop()

    def _note(self, number: int) -> None:
        """Note a signal before the training has taken them over."""
        assert self._trainer is not None
        connector: Any = self._trainer._signal_connector
        connector.received_sigterm = True

    def _gone(self, rank: int, words: str, status: int = 0) -> None:
        assert self._trainer is not None
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # what is being written is the state to go on from
                thread.join(30)
        speaker = 0 if rank or status else 1  # the first process says itself why it ends, where it knows
        if self._trainer.global_rank == speaker:
            print(f"\n{self._paragraph(rank, words, status)}\n", file=sys.stderr, flush=True)
        os._exit(status or EXIT_AGAIN)  # the main thread may wait for ever in a collective

    def _paragraph(self, rank: int, words: str, status: int) -> str:
        trainer = self._trainer
        assert trainer is not None
        if status:
            message = f"Rank {rank} of {trainer.world_size}: {words}"
            event(trainer, "stopped", message, cause="lost_rank")
            return textwrap.fill(f"lit-qrl: {message}", 110, break_long_words=False, break_on_hyphens=False)
        how = f"by an error: {words}" if words else "without a word, as a process does that is killed"
        saved = last_checkpoint(trainer.default_root_dir)
        where = f"The last checkpoint is {saved}." if saved else "No checkpoint had been written."
        message = f"Rank {rank} of {trainer.world_size} ended {how}, so the others end too."
        event(trainer, "stopped", f"{message} {where}", cause="lost_rank")
        again = "Start the run again with --resume_if_possible true; any number of processes goes on from it."
        return textwrap.fill(f"lit-qrl: {message} {where} {again}", 110, break_long_words=False)


def _status(trainer: Trainer, error: BaseException) -> int:
    """Return the exit status of an error that another start does not help against, else 0."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    if isinstance(error, StoppedError):
        return EXIT_STOPPED
    if out_of_memory(error):
        return EXIT_STOPPED if has_learned(trainer) else EXIT_CONFIG
    return 0


def relieve_lightning() -> None:
    """End the thread in which Lightning kills the first process, without a word, when another has ended."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            vars(thread)["_run"] = lambda: True


def note_signals(trainer: Trainer) -> None:
    """Have Lightning's handler of SIGTERM note it and tell the processes that this one started, and nothing more.

    It would broadcast, wherever each process is: for ever, where another one is in another collective.
    """
    connector: Any = trainer._signal_connector

    def note(number: int, frame: Any) -> None:
        launcher: Any = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(number)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note


def settings(trainer: Trainer) -> dict[str, Any]:
    """Return what must be the same in every process of a run, by the keys of the command line."""
    chosen = trainer_settings(trainer)
    del chosen["default_root_dir"]  # the first process's is where the run is written
    if not isinstance(trainer.strategy, Described):  # Lightning's own are named by their class
        chosen["strategy"] = type(trainer.strategy).__name__
    data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    parts = {"trainer": chosen, "model": describe(trainer.lightning_module), "data": describe(data)}
    return flat({"seed_everything": os.environ.get("PL_GLOBAL_SEED"), **parts})
