"""A group of a run and the processes of its engines, over which one sending of a tensor reaches all of them.

It is of its own: the run's processes have a group for the learner, and vLLM makes others in the engine's process.
"""

import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from lit_qrl.rollout.engine import EngineDiedError

Backend = Literal["collective", "nccl"]
MEETING = timedelta(seconds=30)
"""How long processes wait for each other when a group is made, and for one tensor."""
POLL = 0.0002
"""Seconds between two looks at whether a tensor has arrived."""


def local_address(connection: Any) -> str:
    """Return the address of this host that a connection leaves from."""
    held = socket.socket(fileno=connection.fileno())
    try:
        return str(held.getsockname()[0])
    finally:
        held.detach()


class Meeting:
    """Where the processes of a group find each other; the run holds it, and tells its name to who knows the token."""

    def __init__(self) -> None:
        held = distributed.TCPStore("0.0.0.0", 0, None, True, MEETING, wait_for_workers=False)
        self.port, self.name = held.port, secrets.token_hex(16)
        self.store: Any = distributed.PrefixStore(self.name, held)


def join(address: str, port: int, name: str) -> Any:
    """Return the meeting of that name that the run holds at an address."""
    return distributed.PrefixStore(name, distributed.TCPStore(address, port, None, False, MEETING))


class Group:
    """This process among those that tensors are sent to; all make it at the same time.

    Args:
        store: of the meeting.
        rank: of this process; the run is the first.
        size: of the group.
        backend: `collective` sends from host to host (gloo), `nccl` from GPU to GPU.
        address: of this host.
    """

    def __init__(self, store: Any, rank: int, size: int, backend: Backend, address: str) -> None:
        self.backend: Backend = backend
        gloo: Any = distributed.ProcessGroupGloo
        if backend == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = 4 * MEETING  # a watchdog of torch's ends the process then
            self._group: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            options: Any = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = MEETING
            self._group = gloo(store, rank, size, options)

    def broadcast(self, flat: Tensor) -> None:
        """Send bytes from the run to all others, or take them here.

        Raises:
            EngineDiedError: where they did not arrive, after which the group is of no use.
        """
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        try:
            work = self._group.broadcast([flat], options)
            if self.backend == "nccl":
                deadline = time.monotonic() + MEETING.total_seconds()
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        self.close()
                        raise RuntimeError(f"no answer within {MEETING.total_seconds():g} s")
                    time.sleep(POLL)  # an engine that draws has the rest of this process
            work.wait()
        except RuntimeError as error:
            raise EngineDiedError(f"A tensor did not reach the engines' processes: {error}") from error
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()

    def close(self) -> None:
        """Leave the group."""
        with suppress(Exception):
            self._group.abort()
