"""A start of vLLM that fails leaves the process as it was, so that another engine can start in it."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from lit_qrl.rollout.vllm.shutdown import collect_memory
from lit_qrl.rollout.vllm.upkeep import forget_graph_pool

PAYS_FROM = 50_000
"""Decode steps from which a compiled start is over sooner: it takes about a minute more, and a step 1 to 2 ms less."""


def compilation(quick_start: bool | Literal["auto"], decode_steps: int) -> dict[str, Any]:
    """Return vLLM's argument for a start without compilation, or none where it compiles, as on a CPU it may.

    Args:
        quick_start: as of `VLLMEngine`.
        decode_steps: that the run plans, 0 where nobody knows.
    """
    quick = decode_steps < PAYS_FROM if quick_start == "auto" else quick_start
    if not quick or not torch.cuda.is_available():
        return {}
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


@contextmanager
def undone_on_failure(remove_folder: Callable[[], None]) -> Iterator[None]:
    """Take back on an exception what vLLM's start has changed: environment, process groups, memory, and its folder.

    Generators and `torch.set_num_threads` are restored in any case, by `process.kept_process_state`.
    """
    environment, owns_process_group = dict(os.environ), not torch.distributed.is_initialized()
    groups = _groups()  # those of an engine that runs already
    handled = sys.exception()
    try:
        yield
    except BaseException as error:
        _clear_frames(error, handled)
        _leave_groups(groups, owns_process_group)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        remove_folder()
        collect_memory()
        raise


def _clear_frames(error: BaseException, handled: BaseException | None) -> None:
    """Drop the local variables of the frames that an exception came through: they hold the unfinished engine.

    Args:
        error: of the start.
        handled: what the caller was handling when it began; its frames are not the engine's.
    """
    seen = {id(handled)}
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]


def _groups() -> dict[str, Any]:
    """Return the process groups that vLLM keeps in this process, by the names of its variables."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state is None:
        return {}
    return {name: value for name, value in vars(state).items() if isinstance(value, state.GroupCoordinator)}


def _leave_groups(before: dict[str, Any], owns_process_group: bool) -> None:
    """End the groups that are not among those of before, and torch's own process group if the start made it."""
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    if state is None:
        return
    if owns_process_group:
        state.cleanup_dist_env_and_memory()
        forget_graph_pool()
        return
    made = {name: group for name, group in _groups().items() if name not in before}
    for group in {id(group): group for group in made.values()}.values():  # one may have several names
        group.destroy()
    for name in made:
        setattr(state, name, None)
