"""The process that an engine runs in: its environment, a start that fails and leaves it as it was, and the end."""

import gc
import logging
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from lit_qrl.rollout.vllm.upkeep import forget_graph_pool, hold_pools, release_pools


def environment_of(deep_gemm: bool, kv_cache_gib: float | None, first_runner: bool = False) -> dict[str, str]:
    """Return what vLLM reads from the environment; what the user has set himself is kept.

    Args:
        deep_gemm: allow DeepGEMM for fp8_block. It rounds scales to powers of two unless told otherwise, so that is
            switched off in either case: the sampler must multiply with the scales that were published.
        kv_cache_gib: size of the KV cache on CPU.
        first_runner: take its first model runner on a GPU, where the second is the default for most models.
    """
    defaults = {
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_USE_DEEP_GEMM": "1" if deep_gemm else "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not torch.cuda.is_available():
        # vLLM would pin the threads of this process, the learner's too, to cores of its choice.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib or 1)))
        # With AMX it would round activations to INT8 beside 4-bit weights, which is another format.
        defaults["VLLM_CPU_INT4_W4A8"] = "0"
    found = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return found | ({"VLLM_USE_V2_MODEL_RUNNER": "0"} if first_runner and torch.cuda.is_available() else {})


def prepare_environment(deep_gemm: bool, kv_cache_gib: float | None, first_runner: bool = False) -> None:
    """Set the environment for an engine in this process; the arguments are those of `environment_of`."""
    os.environ.update(environment_of(deep_gemm, kv_cache_gib, first_runner))
    # In process, or tensors could not be handed over without a copy through the host.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if torch.cuda.is_available():
        # The learner's device, which it takes for that of the first of several; it would take GPU 0.
        os.environ["VLLM_DP_RANK_LOCAL"] = str(torch.cuda.current_device())


@contextmanager
def own_world(size: int = 1) -> Iterator[Any]:
    """Let the processes of one engine be torch's default process group inside, where a run has more, and yield it.

    An engine makes its groups of all processes of the default group, at which each must arrive. Engines that have
    nothing to say to each other are built, rebuilt and ended by each process when it needs to; those that compute
    together (neighbours by rank) when each of them does, for torch names a group by how many there were before.

    Args:
        size: processes that hold an engine together.
    """
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        yield None
        return
    whole: Any = distributed_c10d.GroupMember.WORLD
    first = distributed.get_rank() // size * size
    # gloo, which nobody has to wait for; the engine names the backend of its own groups.
    ranks = list(range(first, first + size))
    own: Any = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
    own.bound_device_id = None  # the whole group's, from whose communicator those inside would be split
    distributed_c10d._update_default_pg(own)
    try:
        with _launched(size):
            yield own
    finally:
        distributed_c10d._update_default_pg(whole)


@contextmanager
def _launched(size: int) -> Iterator[None]:
    """Set inside what vLLM reads where something else has started the processes of an engine."""
    if size == 1:
        yield
        return
    device = torch.cuda.current_device() if torch.cuda.is_available() else distributed.get_rank()
    told = {"RANK": str(distributed.get_rank()), "LOCAL_RANK": str(device)}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Restore on exit what an engine changes: global generators, and on CPU `torch.set_num_threads`.

    It is built with a seed of its own, and draws from the global generators even for seeded requests. Inside, tensors
    without a dtype are fp32, as vLLM's kernels take their scales: Lightning's `bf16-true` makes them bf16 around a
    validation step.
    """
    import numpy

    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    set_num_threads, dtype = torch.set_num_threads, torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_default_dtype(dtype)
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


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


log = logging.getLogger(__name__)


def shutdown(llm: Any, owns_process_group: bool, keep_weights: bool = False) -> None:
    """End an in-process engine and free its GPU memory, whoever still refers to it.

    Args:
        llm: the engine.
        owns_process_group: the engine made the process group, so it is destroyed.
        keep_weights: a learner computes with them.
    """
    from vllm.distributed import parallel_state as state
    from vllm.model_executor.model_loader.reload import layerwise

    ((model, storages),) = llm.collective_rpc("held_at_the_end", args=(keep_weights,))
    hold_pools()
    try:
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:  # of an engine that died
        log.warning("vLLM did not shut down cleanly: %s: %s", type(error).__name__, error)
    for module in model.modules():  # kept by weak reference, but the watched loaders refer to the model
        layerwise.LAYERWISE_INFO.pop(module, None)
    # Its argument is the model, from which the watched loaders lead back to the engine: alone it would never run.
    finalizer = getattr(llm.llm_engine, "_finalizer", None)
    if finalizer is not None:
        finalizer()
    for storage in storages:
        storage.resize_(0)
    forget_graph_pool()
    if owns_process_group:
        state.cleanup_dist_env_and_memory()
        return
    state.destroy_model_parallel()
    if distributed.is_initialized() and distributed.get_world_size() > 1 and state._WORLD is not None:
        state._WORLD.destroy()  # that vLLM has made of this one process, after the others: none may be built over it
        state._WORLD = None


def collect_memory() -> None:
    """Give back what an engine held; nothing may refer to it any more, and its own objects refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        release_pools()
