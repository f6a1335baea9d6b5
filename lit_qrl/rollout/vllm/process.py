"""The process that an engine runs in: its environment, and what an engine changes of it."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d


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
def others_group_kept(owned: bool) -> Iterator[None]:
    """Keep torch's default process group inside, which vLLM 0.26 ends with every engine, though a run may have made it.

    Args:
        owned: the engine made it.
    """
    destroy = distributed.destroy_process_group

    def own_alone(group: Any = None) -> None:
        if group is not None or owned:
            destroy(group)

    distributed.destroy_process_group = own_alone
    try:
        yield
    finally:
        distributed.destroy_process_group = destroy


def end_world() -> None:
    """End the group of all processes that vLLM has made of this one, after the others; none may be built over it."""
    from vllm.distributed import parallel_state

    state: Any = parallel_state
    if distributed.is_initialized() and distributed.get_world_size() > 1 and state._WORLD is not None:
        state._WORLD.destroy()
        state._WORLD = None


@contextmanager
def kept_process_state(seed: int | None = None) -> Iterator[None]:
    """Restore on exit what an engine changes: global generators, and on CPU `torch.set_num_threads`.

    It is built with a seed of its own, and draws from the global generators even for seeded requests.

    Args:
        seed: for them inside.
    """
    import numpy

    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    set_num_threads = torch.set_num_threads
    try:
        if seed is not None:
            torch.manual_seed(seed)
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
