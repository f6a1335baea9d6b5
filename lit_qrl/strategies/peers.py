"""The processes of one run: compared before one of them loads anything, and ended with a name when another is gone.

torchrun and SLURM end the other processes of a run themselves, and a broken collective says that somebody is gone, not
who or why. What is added here: settings that differ are named before a group exists in which they would hang, a rank
that does not come too; a process that dies is named at once by those that wait for it, whatever they wait in; and a
signal to one of them reaches all, so that they end at the same place.
"""

import json
import os
import re
import secrets
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore

from lit_qrl.errors import EXIT_CONFIG, EXIT_STOPPED, ConfigError, StoppedError, listed, out_of_memory
from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.run.config import flat
from lit_qrl.run.description import Described, describe
from lit_qrl.run.event_log import event
from lit_qrl.run.folder import last_checkpoint, shown
from lit_qrl.run.interrupt import InterruptedTogether, Interruption
from lit_qrl.run.stop import has_learned

EXIT_AGAIN = 75
"""Exit status of a run that nothing is wrong with: start it again."""
SIGNALLED = 128
"""A process says this and its number of a signal, its exit status of its end, and nothing where it is killed."""
GRACE = 20.0
"""Seconds in which a process may end by the same error as another, before that one's is told for all."""
REACHED = 25.0
"""Seconds in which the first process's host must answer; one that cannot be reached is named then."""
COME = 600.0
"""Seconds in which all must have come: a cluster may start one host minutes after another."""
CONNECT = 60.0
SILENCE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Of a host that is gone no connection is closed: after 30 s without an answer it counts as gone."""
BROKEN = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe|process ?group", re.IGNORECASE)
"""What a collective says when another process is gone."""
PLAIN_SETTINGS = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches"),
    *("limit_test_batches", "limit_predict_batches", "check_val_every_n_epoch", "gradient_clip_val"),
    *("num_sanity_val_steps", "log_every_n_steps", "fast_dev_run"),
)
"""What can be read from a Trainer under the name that its constructor has for it."""


def several_processes() -> bool:
    """Return whether processes are joined to one run.

    >>> several_processes()
    False
    """
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def gather_objects(own: Any) -> list[Any]:
    """Return what every rank gives, by rank; in a single process its own alone.

    >>> gather_objects("mine")
    ['mine']
    """
    if not several_processes():
        return [own]
    found = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


class Meeting:
    """Gives every process what each of the others gives, by the store in which torch.distributed will join them.

    Args:
        address: of the first process's host.
        port: at which it is met.
        rank: of this process.
        size: how many there are.

    Raises:
        ConfigError: when the first process cannot be reached, or cannot listen there.
    """

    def __init__(self, address: str, port: int, rank: int, size: int) -> None:
        self._rank, self._size, self._place, self._rounds = rank, size, f"{address}:{port}", 0
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store
        try:
            if rank or hosted:
                _reach(address, port)
            limit = timedelta(seconds=CONNECT)
            store = TCPStore(
                address, port, size, rank == 0 and not hosted, limit, wait_for_workers=False, multi_tenant=True
            )
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                "The processes of the run cannot meet.",
                expected=f"the first of them at {self._place}" if rank else f"a port that it can listen on, {port}",
                given=str(error).splitlines()[0],
                remedy="Set MASTER_ADDR and MASTER_PORT to the same on every host: the first one's, and a free port.",
            ) from error
        self._store: Store = PrefixStore(f"lit_qrl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def exchange(self, own: Any) -> list[Any]:
        """Return what every process gives, by rank.

        Args:
            own: of this process, as JSON can hold it.

        Raises:
            ConfigError: when some do not come, or the first one has ended.
        """
        self._rounds += 1
        keys = [f"{self._rounds}/{rank}" for rank in range(self._size)]
        try:
            self._store.set(keys[self._rank], json.dumps(own))
            missing = self._missing(keys, COME)
            if not missing:
                found = [json.loads(self._store.get(key)) for key in keys]
                self._store.set(f"{keys[self._rank]} read", "")
                if self._rank == 0:  # whose end may be the store's
                    self._missing([f"{key} read" for key in keys], REACHED)
                return found
        except RuntimeError as error:
            raise ConfigError(
                "The first process of the run ended before the others had met it.",
                given=self._place,
                remedy="What it says on its host is why.",
            ) from error
        raise ConfigError(
            "Processes of the run are missing.",
            expected=f"{self._size} at {self._place}, within {COME / 60:.0f} minutes",
            given=f"none of rank {listed(missing, 8)}",
            remedy="See what their hosts say, and start all of them with the same MASTER_ADDR and MASTER_PORT.",
        )

    def _missing(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Return the ranks that have not given theirs after so long; in steps, between which a signal is heard."""
        until = time.monotonic() + seconds
        while missing := [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return missing


def _reach(address: str, port: int) -> None:
    """Wait for the first process, for long only where its host answers that it does not listen yet."""
    until = time.monotonic() + COME
    while True:
        try:
            socket.create_connection((address, port), timeout=REACHED).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
        time.sleep(1)


def check_same(settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` where the processes of a run were started with different settings.

    Args:
        settings: of each rank, by their keys.

    >>> check_same([{"data.group_size": 4}, {"data.group_size": 4}])
    """
    first = settings[0]
    for rank, other in enumerate(settings):
        differing: list[str] = []
        for key in sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key)):
            if not any(key.startswith(f"{above}.") for above in differing):  # of a class that differs, the class alone
                differing.append(key)
        if differing:
            shown = [f"{key} {first.get(key)} on rank 0 and {other.get(key)} on rank {rank}" for key in differing]
            raise ConfigError(
                "The processes of the run were started with different settings.",
                expected="the same on every rank",
                given=listed(shown, 3),
                remedy="Start all of them with one command and the same configuration files.",
            )


class PeerWatch:
    """Tells when another process of the run ends before this one, at once and whatever this one is waiting for.

    Every process holds a connection to the first one, which the system closes when either is killed. Nothing is sent
    while all live, so a process that computes for long is not taken for dead; what is said is a byte: an exit status,
    0 of a process whose work is done, or a signal.

    Args:
        gone: called in a thread of its own with the rank of a process that has ended, and the status that it ends with,
            None where it was killed.
        signalled: called there with the number of a signal that another process got.
    """

    def __init__(self, gone: Callable[[int, int | None], None], signalled: Callable[[int], None]) -> None:
        self._gone, self._signalled = gone, signalled
        self._peers: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._ended, self._decided = threading.Event(), threading.Event()

    def start(self, rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> None:
        """Connect the processes; a second call before `stop` changes nothing.

        Args:
            rank: of this process.
            size: how many there are.
            exchange: gives each what every process gives, by rank.
        """
        if self._peers:
            return
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if rank == 0:
            local = host in ("127.0.0.1", "localhost")
            with socket.create_server(("127.0.0.1" if local else "", 0)) as server:
                token = secrets.token_hex(16)
                exchange([server.getsockname()[1], token])
                server.settimeout(CONNECT)
                while len(self._peers) < size - 1:
                    connection = server.accept()[0]
                    connection.settimeout(CONNECT)
                    hello = connection.recv(64).decode(errors="replace").split()
                    if len(hello) == 2 and secrets.compare_digest(hello[0], token):
                        self._peers[int(hello[1])] = connection
                    else:
                        connection.close()
        else:
            port, token = exchange(None)[0]
            self._peers[0] = socket.create_connection((host, port), timeout=CONNECT)
            self._peers[0].sendall(f"{token} {rank}".encode())
        self._ended.clear()
        self._decided.clear()
        for peer, connection in self._peers.items():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in SILENCE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            self._threads.append(threading.Thread(target=self._listen, args=(peer,), name="peers", daemon=True))
            self._threads[-1].start()

    def tell(self, said: int, without: int = -1) -> None:
        """Tell the others of an exit status, or of a signal: a handler may call this."""
        for rank, connection in list(self._peers.items()):
            if rank != without:
                with suppress(OSError):
                    connection.sendall(bytes([said]))

    def stop(self, status: int = 0) -> None:
        """Part from the others.

        Args:
            status: that this process ends with, where it ends by an error: the first one speaks before it does, since
                what started the processes may end all of them with the first that ends.
        """
        self._ended.set()
        self._decided.set()
        self.tell(status)
        if status and 0 in self._peers:
            for thread in self._threads:
                thread.join(1.25 * GRACE)
        for connection in self._peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5)
        for connection in self._peers.values():
            connection.close()
        self._peers, self._threads = {}, []

    def wait(self, seconds: float) -> None:
        """Give the threads time to find out which process is gone: a broken collective says less than that."""
        self._decided.set()
        for thread in self._threads:
            thread.join(seconds)

    def _listen(self, rank: int) -> None:
        while True:
            try:
                said = self._peers[rank].recv(1)
            except (OSError, KeyError):
                said = b""
            status = said[0] if said else None
            if status is not None and status > SIGNALLED:
                self.tell(status, without=rank)  # they hear each other through the first one alone
                self._signalled(status - SIGNALLED)
                continue
            if status == 0:
                return
            if status not in (None, EXIT_AGAIN):
                self._decided.wait(GRACE)  # most errors are the same on all ranks: then this process ends by its own
            if not self._ended.is_set():  # else it waited for the first one to speak
                self._gone(rank, status)
            return


class Peers(Callback):
    """Meets the other processes of a run and watches them; `GRPOModule` adds it where there are several."""

    def __init__(self) -> None:
        self._watch = PeerWatch(self._gone, lambda number: self.on_signal(number))
        self.on_signal: Callable[[int], None] = lambda number: None
        """Called in a thread of its own with the number of a signal that another process got."""
        self._trainer: Trainer | None = None
        self._meeting: Meeting | None = None

    def meet(self, trainer: Trainer) -> "Peers":
        """Return this one, when it has found the others and all were started with the same, before anything is loaded.

        Raises:
            ConfigError: when one does not come, the first cannot be reached, or settings differ.
        """
        self._trainer = trainer
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
        check_same(given)
        self._watch.start(rank, size, exchange)
        return self

    def tell_signal(self, number: int) -> None:
        """Tell the others of a signal that this process got; a handler may call this."""
        self._watch.tell(SIGNALLED + number)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Raise `ConfigError` where the others go on from another checkpoint: each takes the one that it sees."""
        steps = gather_objects(trainer.global_step)
        if len(set(steps)) > 1:
            raise ConfigError(
                "The processes of the run go on from different checkpoints.",
                expected="one run folder that all of them see",
                given=listed([f"step {step} on rank {rank}" for rank, step in enumerate(steps)], 3),
                remedy="Put trainer.default_root_dir on a disk that all machines share.",
            )

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Part from the others."""
        self._watch.stop()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Tell the others; an error of a collective is one that a process which is gone has caused."""
        if isinstance(exception, InterruptedTogether):  # they end by the same
            self._watch.stop()
            return
        if isinstance(exception, (RuntimeError, OSError)) and BROKEN.search(f"{type(exception)} {exception}"):
            self._watch.wait(10)
        self._watch.stop(_status(trainer, exception))

    def _gone(self, rank: int, status: int | None) -> None:
        trainer = self._trainer
        assert trainer is not None
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # what is being written is the state to go on from
                thread.join(30)
        again = status in (None, 1, EXIT_AGAIN)
        # The first process speaks where it lives; where it ends by an error it says so itself.
        if trainer.global_rank == 0 or (rank == 0 and status is None and trainer.global_rank == 1):
            how = "by an error, which it tells," if status else "without a word, as a process does that is killed,"
            message = f"Rank {rank} of {trainer.world_size} ended {how} so the others end too."
            saved = last_checkpoint(trainer.default_root_dir)
            where = f"The last checkpoint is {shown(saved)}." if saved else "No checkpoint had been written."
            event(trainer, "stopped", f"{message} {where}", cause="lost_rank")
            more = "Start the run again with --resume_if_possible true; any number of processes goes on from it."
            words = f"lit-qrl: {message} {where} {more if again else ''}"
            print(f"\n{textwrap.fill(words, 110, break_long_words=False)}\n", file=sys.stderr, flush=True)
        ending = EXIT_AGAIN if again else int(status or 0)
        self._watch.tell(ending)
        os._exit(ending)  # the main thread may wait for ever in a collective


def _status(trainer: Trainer, error: BaseException) -> int:
    """Return the exit status of an error: another start does not help against 2 and 70."""
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    if isinstance(error, StoppedError):
        return EXIT_STOPPED
    if out_of_memory(error):
        return EXIT_STOPPED if has_learned(trainer) else EXIT_CONFIG
    return 1


def settings(trainer: Trainer) -> dict[str, Any]:
    """Return what must be the same in every process of a run, by the keys of the command line."""
    chosen = trainer_settings(trainer)
    del chosen["default_root_dir"]  # the first process's is where the run is written
    if not isinstance(trainer.strategy, Described):  # Lightning's own are named by their class
        chosen["strategy"] = type(trainer.strategy).__name__
    data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    parts = {"trainer": chosen, "model": describe(trainer.lightning_module), "data": describe(data)}
    return flat({"seed_everything": os.environ.get("PL_GLOBAL_SEED"), **parts})


def trainer_settings(trainer: Trainer, without: tuple[type, ...] = ()) -> dict[str, Any]:
    """Return the arguments with which a Trainer is made again, except its loggers.

    Args:
        trainer: before or in a run.
        without: classes of callbacks that are left out.

    >>> trainer_settings(Trainer(max_epochs=3, logger=False, accelerator="cpu"))["max_epochs"]
    3
    """
    plugin, strategy, clip = trainer.precision_plugin, trainer.strategy, trainer.gradient_clip_algorithm
    quantized = isinstance(plugin, QuantizedPrecision)
    plain = "auto" if trainer.world_size == 1 else getattr(strategy, "strategy_name", "auto")
    callbacks = [one for one in trainer.callbacks if type(one) not in without]  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "accelerator": trainer.accelerator.name(),
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "strategy": describe(strategy) if isinstance(strategy, Described) else plain,
        "precision": None if quantized else trainer.precision,
        "plugins": [describe(plugin)] if quantized else None,
        "gradient_clip_algorithm": None if clip is None else clip.value,
        "callbacks": [describe(one) for one in callbacks] or None,
        "default_root_dir": shown(trainer.default_root_dir),
        "deterministic": True if torch.are_deterministic_algorithms_enabled() else None,
        "use_distributed_sampler": False,
        "enable_model_summary": False,
        **{name: getattr(trainer, name) for name in PLAIN_SETTINGS},
    }
