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
    torch.multiprocessing.spawn(_process, (port, function, folder), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _process(rank: int, port: int, function, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.save(function(rank, port, folder), folder / f"{rank}.pt")
