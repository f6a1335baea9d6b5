"""Processes on this machine that gloo joins: one alone, or two, of which what they return comes back to the test."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

RANKS = 2
MEETINGS = 24
"""Trainers that join the two processes, at most."""
LONGEST = 600
"""Seconds for all of them."""


@contextmanager
def one_process(folder: Path) -> Iterator:
    """Make this process a group of its own, and give its mesh."""
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def free_ports(count: int = MEETINGS) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def join(rank: int, ports: Iterator[int]) -> None:
    """Make the next Trainer of this process one of two; the end of its run takes these variables away.

    They meet at a port of their own: where the last meeting was, the other process may not have left yet.
    """
    port = str(next(ports))
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def in_two(function, folder: Path) -> list:
    """Return `function(rank, ports, folder)` of both processes."""
    processes = started(_process, free_ports(), function, folder)
    for process in processes:
        process.join(LONGEST)
        process.kill()  # where it still waits for the other
        process.join()
    assert [process.exitcode for process in processes] == [0] * RANKS
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def started(target, *arguments) -> list:
    """Return both processes, started with their rank first; they share one import of everything."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_processes"])
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    return processes


def _process(rank: int, ports: list[int], function, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.save(function(rank, iter(ports), folder), folder / f"{rank}.pt")
