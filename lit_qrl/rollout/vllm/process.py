"""The process that an engine runs in: its environment, and what an engine changes of it."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def prepare_environment(deep_gemm: bool, kv_cache_gib: float | None) -> None:
    """Set what vLLM reads from the environment; what the user has set himself is kept.

    Args:
        deep_gemm: allow DeepGEMM for fp8_block. It rounds scales to powers of two unless told otherwise, so that is
            switched off in either case: the sampler must multiply with the scales that were published.
        kv_cache_gib: size of the KV cache on CPU.
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
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # In process, or tensors could not be handed over without a copy through the host.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


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
