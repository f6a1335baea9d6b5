"""Where the processes of a run meet before one of them loads anything: what each gives, all get."""

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore

from lit_qrl.errors import ConfigError, listed

log = logging.getLogger(__name__)

REACHED = 25.0
"""Seconds in which the first process's host must answer; one that cannot be reached is named then."""
TOLD = 30.0
"""Seconds after which it is said whom a process waits for."""
COME = 600.0
"""Seconds in which all must have come: a cluster may start one host minutes after another."""
PAUSE = 0.05


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

    The group needs all processes to be of one strategy, and waits for minutes without a word where one does not come.

    Args:
        address: of the first process's host.
        port: at which it is met.
        rank: of this process.
        size: how many there are.

    Raises:
        ConfigError: when the first process cannot be reached, or what answers there is none.
    """

    def __init__(self, address: str, port: int, rank: int, size: int) -> None:
        self._rank, self._size, self._rounds = rank, size, 0
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun holds the store
        self._place = f"{address}:{port}"
        if rank or hosted:
            self._reach(address, port)
        store = _store(address, port, size, own=rank == 0 and not hosted)
        if store is None:
            raise ConfigError(
                "The processes of the run cannot meet.",
                expected=f"the first of them at {self._place}" if rank else "a port that it can listen on",
                given=f"{self._place}, {'which is no process of a run' if rank else 'which it cannot open'}",
                remedy="Set MASTER_ADDR and MASTER_PORT to the same on every host: the first one's, and a free port.",
            )
        self._store: Store = PrefixStore(f"lit_qrl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def exchange(self, own: Any) -> list[Any]:
        """Return what every process gives, by rank.

        Args:
            own: of this process, as JSON can hold it.

        Raises:
            ConfigError: when some do not come.
        """
        self._rounds += 1
        try:
            self._store.set(f"{self._rounds}/{self._rank}", json.dumps(own))
            self._wait()
            found = [json.loads(self._store.get(f"{self._rounds}/{rank}")) for rank in range(self._size)]
            self._store.add(f"{self._rounds}/read", 1)
            if self._rank == 0:  # whose end may be the store's
                until = time.monotonic() + REACHED
                while self._store.add(f"{self._rounds}/read", 0) < self._size and time.monotonic() < until:
                    time.sleep(PAUSE)
        except RuntimeError as error:
            raise ConfigError(
                "The first process of the run ended before the others had met it.",
                given=self._place,
                remedy="What it says on its host is why.",
            ) from error
        return found

    def _wait(self) -> None:
        began, told = time.monotonic(), False
        while missing := self._missing():
            waited = time.monotonic() - began
            if waited > COME:
                raise ConfigError(
                    "Processes of the run are missing.",
                    expected=f"{self._size} at {self._place}, within {COME / 60:.0f} minutes",
                    given=f"none of rank {listed([str(rank) for rank in missing], 8)}",
                    remedy="See what their hosts say, and start all of them with the same MASTER_ADDR and MASTER_PORT.",
                )
            if waited > TOLD and not told and self._rank == 0:
                told = True
                log.warning("Waiting at %s for rank %s.", self._place, listed([str(rank) for rank in missing], 8))
            time.sleep(PAUSE)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._size) if not self._store.check([f"{self._rounds}/{rank}"])]

    def _reach(self, address: str, port: int) -> None:
        """Wait for the first process, for long only where its host answers that it does not listen yet."""
        began, told = time.monotonic(), False
        while True:
            try:
                socket.create_connection((address, port), timeout=REACHED).close()
                return
            except OSError as error:
                waited = time.monotonic() - began
                if waited > (COME if isinstance(error, ConnectionRefusedError) else REACHED):
                    raise ConfigError(
                        "The first process of the run cannot be reached.",
                        expected=f"an answer of {self._place} (MASTER_ADDR and MASTER_PORT)",
                        given=f"{error.strerror or error} after {waited:.0f} s",
                        remedy="See that the address is its host's, that it was started, and that no firewall stands "
                        "between.",
                    ) from error
                if waited > TOLD and not told:
                    told = True
                    log.warning("Waiting for the first process at %s: %s.", self._place, error.strerror or error)
                time.sleep(1)


def _store(address: str, port: int, size: int, own: bool) -> Store | None:
    """Return the store at an address, whose server the group's own will share; None where there is none.

    It is asked for in a thread: of a program that listens there and never answers, torch waits for ever.
    """
    found: list[Store] = []

    def ask() -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=REACHED)
            found.append(TCPStore(address, port, size, own, limit, wait_for_workers=False, multi_tenant=True))

    asking = threading.Thread(target=ask, name="meeting", daemon=True)
    asking.start()
    asking.join(REACHED)
    return found[0] if found else None
