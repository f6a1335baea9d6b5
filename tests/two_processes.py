"""Two processes on this machine that gloo joins; what they return comes back to the test."""

import os
import socket
from pathlib import Path

import torch

RANKS = 2


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join(rank: int, port: int) -> None:
    """Make the next Trainer of this process one of two; the end of its run takes these variables away."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def in_two(function, folder: Path) -> list:
    """Return `function(rank, port, folder)` of both processes."""
    port = free_port()
    processes = started(_process, port, function, folder)
    for process in processes:
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


def _process(rank: int, port: int, function, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.save(function(rank, port, folder), folder / f"{rank}.pt")
