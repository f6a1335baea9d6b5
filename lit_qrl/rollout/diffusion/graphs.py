"""A step of fixed shapes as one CUDA graph."""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(slots=True)
class Trust:
    """What is known of recorded steps.

    Args:
        checked: whether one was compared with the launched step.
        broken: whether it drew other tokens.
    """

    checked: bool = False
    broken: bool = False


def record(
    work: Callable[[], object], device: torch.device, former: torch.cuda.CUDAGraph | None = None
) -> torch.cuda.CUDAGraph:
    """Return some work as a graph; it is not done yet. Unlike `torch.cuda.graph`, free memory stays the allocator's.

    Args:
        work: writes its results into tensors that were there before, and waits for nothing.
        device: a CUDA device.
        former: a graph that is not replayed again, whose memory this one takes over.
    """
    graph, stream = torch.cuda.CUDAGraph(), _stream(device)
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    collects = gc.isenabled()
    gc.disable()  # what it would free may be another graph, which must not happen while one is recorded
    try:
        with torch.cuda.stream(stream):
            options: dict[str, Any] = {} if former is None else {"pool": former.pool()}
            graph.capture_begin(capture_error_mode="thread_local", **options)
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # what failed, such as memory that ran out, is the caller's to know
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    current.wait_stream(stream)
    return graph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that graphs are recorded on: one, since libraries keep a workspace for each, made here."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        small = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(small, small)
    return stream
