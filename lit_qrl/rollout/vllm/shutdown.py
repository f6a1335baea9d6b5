"""The end of an engine: everything that it held is given back, whoever still refers to it."""

import gc
import logging
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.rollout.vllm.locations import model_runner
from lit_qrl.rollout.vllm.process import end_world, others_group_kept
from lit_qrl.rollout.vllm.upkeep import forget_graph_pool, hold_pools, release_pools

log = logging.getLogger(__name__)


def shutdown(llm: Any, owns_process_group: bool, keep_weights: bool = False) -> None:
    """End an in-process engine and free its GPU memory, whoever still refers to it.

    Args:
        llm: the engine.
        owns_process_group: the engine made the process group, so it is destroyed.
        keep_weights: a learner computes with them.
    """
    from vllm.distributed import parallel_state

    model = model_runner(llm).get_model()
    storages = _storages(llm, model, keep_weights)
    hold_pools()
    with others_group_kept(owns_process_group):
        try:
            llm.llm_engine.engine_core.shutdown()
        except Exception as error:  # of an engine that died
            log.warning("vLLM did not shut down cleanly: %s: %s", type(error).__name__, error)
        _forget_reloads(model)
        # Its argument is the model, from which the watched loaders lead back to the engine: alone it would never run.
        finalizer = getattr(llm.llm_engine, "_finalizer", None)
        if finalizer is not None:
            finalizer()
    for storage in storages:
        storage.resize_(0)
    forget_graph_pool()
    if owns_process_group:
        parallel_state.cleanup_dist_env_and_memory()
    else:
        parallel_state.destroy_model_parallel()
        end_world()


def _storages(llm: Any, model: nn.Module, keep_weights: bool) -> list[torch.UntypedStorage]:
    """Return where weights and KV cache lie on a GPU, which frames of a failed step or captured graphs keep alive."""
    caches = [getattr(model_runner(llm), "kv_caches", []), *(getattr(m, "kv_cache", []) for m in model.modules())]
    tensors = [] if keep_weights else [*model.parameters(), *model.buffers()]
    while caches:
        one = caches.pop()
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, list | tuple):
            caches.extend(one)
    found = (tensor.untyped_storage() for tensor in tensors if tensor.is_cuda)
    return list({storage.data_ptr(): storage for storage in found}.values())


def _forget_reloads(model: nn.Module) -> None:
    """Drop what vLLM keeps of a model's layers: by weak reference, but the watched loaders refer to the model."""
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        layerwise.LAYERWISE_INFO.pop(module, None)


def collect_memory() -> None:
    """Give back what an engine held; nothing may refer to it any more, and its own objects refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        release_pools()
