"""A step of fixed shapes as one CUDA graph."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lit_qrl.run.imports import uncollected

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Trust:
    """What is known of recorded steps.

    Args:
        checked: whether one was compared with the launched step.
        broken: whether it drew other tokens.
        former: a graph that is not replayed again, whose memory later ones may take over.
        launched: kinds of steps that were launched, so that their kernels are there.
        failed: whether one could not be recorded.
    """

    checked: bool = False
    broken: bool = False
    former: torch.cuda.CUDAGraph | None = None
    launched: set[Any] = field(default_factory=set)
    failed: bool = False


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
    # What a collection would free may be another graph, which must not happen while one is recorded.
    with uncollected(), torch.cuda.stream(stream):
        options: dict[str, Any] = {} if former is None else {"pool": former.pool()}
        graph.capture_begin(capture_error_mode="thread_local", **options)
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # what failed, such as memory that ran out, is the caller's to know
                graph.capture_end()
            raise
        graph.capture_end()
    current.wait_stream(stream)
    return graph


def recorded(
    step: Callable[[], object],
    results: Sequence[Tensor],
    trust: Trust,
    device: torch.device,
    former: torch.cuda.CUDAGraph | None = None,
) -> torch.cuda.CUDAGraph | None:
    """Take a step, whose kernels a step before has made, and return it as a graph, or None where it cannot be one.

    The first graph of all is compared with the step as it is launched.

    Args:
        step: as `record` takes it; taken twice from the same `results` it does the same.
        results: what the step reads and writes over; what it only writes need not be here.
        trust: what is known of recorded steps, which is written to.
        device: a CUDA device.
        former: as `record` takes it.
    """
    try:
        graph = record(step, device, former)
    except torch.OutOfMemoryError:
        raise  # the batch is halved
    except RuntimeError as error:
        step()
        if trust.launched and not trust.failed:  # by other weights, perhaps, which take other kernels
            trust.failed = True
            trust.launched.clear()
            return None
        trust.broken = True
        where = log.isEnabledFor(logging.DEBUG)
        log.warning(
            "A step cannot be recorded as a CUDA graph: steps are launched one by one. %s", error, exc_info=where
        )
        return None
    before = [] if trust.checked else [one.clone() for one in results]
    graph.replay()
    if trust.checked:
        return graph
    replayed = [one.clone() for one in results]
    for one, value in zip(results, before, strict=True):
        one.copy_(value)
    step()
    trust.checked = True
    if all(torch.equal(one, value) for one, value in zip(results, replayed, strict=True)):
        return graph
    trust.broken = True
    log.warning("A recorded step draws other tokens than the launched one: steps are launched one by one.")
    return None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that graphs are recorded on: one, since libraries keep a workspace for each, made here."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        small = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(small, small)
    return stream
