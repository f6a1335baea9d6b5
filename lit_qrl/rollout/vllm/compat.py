"""What differs between vLLM 0.26 and 0.32, and the workarounds for faults of either that would corrupt a publish.

Nothing here imports vLLM before an engine is built.
"""

import importlib
import importlib.util
import logging
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm import cpu as vllm_cpu
from lit_qrl.rollout.vllm import dummy as vllm_dummy
from lit_qrl.rollout.vllm import marlin as vllm_marlin
from lit_qrl.rollout.vllm import nf4 as vllm_nf4
from lit_qrl.rollout.vllm import sleep as vllm_sleep

OLDEST, BEYOND = (0, 26), (0, 33)
# LoRA kernels are compiled for these ranks.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

_MARLIN_MODULES = (
    "vllm.model_executor.layers.quantization.utils.marlin_utils",
    "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4",
    "vllm.model_executor.layers.quantization.utils.marlin_utils_fp8",
    "vllm.model_executor.kernels.linear.mixed_precision.marlin",
)
log = logging.getLogger(__name__)
_workspaces: dict[tuple[Any, ...], Tensor] = {}


# --------------------------------------------------------------------------------------------------------- versions


def installed_version() -> tuple[tuple[int, ...], bool] | None:
    """Return (version, built for CPU) of the installed vLLM without importing it, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    text = (folder / "_version.py").read_text() if (folder / "_version.py").exists() else ""
    found = re.search(r"__version__ = .*?['\"](\d+)\.(\d+)\.(\d+)([^'\"]*)['\"]", text)
    version = tuple(int(part) for part in found.groups()[:3]) if found else (0, 0, 0)
    for_cpu = any(folder.glob("_C_AVX*.so")) or any(folder.parent.glob("vllm_cpu-*.dist-info"))
    return version, for_cpu


def check_installation() -> None:
    """Raise `ConfigError` when vLLM is missing, of an unsupported version, or built for another device."""
    found = installed_version()
    supported = f"vLLM from {'.'.join(map(str, OLDEST))} to below {'.'.join(map(str, BEYOND))}"
    if found is None:
        raise ConfigError(
            "data.engine is VLLMEngine, but vLLM is not installed.",
            expected=supported,
            remedy="Install it with `pip install 'lit-qrl[vllm]'`, or use TransformersEngine.",
        )
    version, cpu_build = found
    if not OLDEST <= version[:2] < BEYOND:
        raise ConfigError(
            "The installed vLLM is not supported.",
            expected=supported,
            given=".".join(map(str, version)),
            remedy="Install a supported version with `pip install 'lit-qrl[vllm]'`, or use TransformersEngine.",
        )
    if cpu_build and torch.cuda.is_available():
        raise ConfigError(
            "The installed vLLM is the CPU build, but this host has a GPU.",
            expected="vLLM built for CUDA",
            given="vllm-cpu",
            remedy="Uninstall vllm-cpu and install `lit-qrl[vllm]`.",
        )
    if not cpu_build and not torch.cuda.is_available():
        raise ConfigError(
            "The installed vLLM is built for CUDA, but this host has no GPU.",
            expected="vllm-cpu",
            given="vLLM for CUDA",
            remedy="Uninstall it and install `lit-qrl[vllm-cpu]`, or use TransformersEngine.",
        )


# ------------------------------------------------------------------------------------------------------ environment


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
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_benign)


def _benign(record: logging.LogRecord) -> bool:
    """Drop the warning that modules without weights of their own (rotary embeddings) received none."""
    return "Failed to load weights" not in record.getMessage()


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Restore on exit what building an engine changes: global generators, and on CPU `torch.set_num_threads`."""
    import numpy

    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        numpy.random.set_state(state[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


# ----------------------------------------------------------------------------------------------------- known faults


def apply_workarounds() -> None:
    """Patch vLLM, once per process, where a reload of weights would otherwise go wrong."""
    _keep_onednn_operands()
    _keep_marlin_workspaces()
    vllm_dummy.apply_workarounds()
    vllm_marlin.apply_workarounds()
    vllm_nf4.register(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if torch.cuda.is_available():
        vllm_sleep.map_before_freeing()
    else:
        vllm_cpu.apply_workarounds()


def _keep_onednn_operands() -> None:
    """Keep the scales of the CPU's INT8 GEMM alive: its handle holds a bare pointer, which a reload would free."""
    import vllm._custom_ops as ops

    original = getattr(ops, "create_onednn_scaled_mm", None)
    if original is None or hasattr(original, "keeps_operands"):
        return

    def create(weight: Tensor, scales: Tensor, *args: Any) -> Any:
        handle = original(weight, scales, *args)
        handle.operands = weight, scales
        return handle

    create.keeps_operands = True  # pyright: ignore[reportFunctionMemberAccess]
    ops.create_onednn_scaled_mm = create


def _keep_marlin_workspaces() -> None:
    """Give every Marlin layer of a device the same lock memory, before and after a reload.

    vLLM 0.26 allocates it anew in each reload while CUDA graphs go on using the freed one, and hangs.
    """
    modules = [importlib.import_module(name) for name in _MARLIN_MODULES if importlib.util.find_spec(name)]
    original = getattr(modules[0], "marlin_make_workspace_new", None)
    if original is None or hasattr(original, "shares_workspaces"):
        return

    def make(device: torch.device, max_blocks_per_sm: int = 1) -> Tensor:
        key = str(device), max_blocks_per_sm
        if key not in _workspaces:
            _workspaces[key] = original(device, max_blocks_per_sm)
        return _workspaces[key]

    make.shares_workspaces = True  # pyright: ignore[reportFunctionMemberAccess]
    for module in modules:
        if hasattr(module, "marlin_make_workspace_new"):
            module.marlin_make_workspace_new = make  # pyright: ignore[reportAttributeAccessIssue]


def clear_workspaces() -> None:
    """Reset Marlin's locks: memory that slept comes back with arbitrary contents."""
    for workspace in _workspaces.values():
        workspace.zero_()


def before_reload(model: nn.Module) -> None:
    """Make the modules repack on this reload where vLLM would skip it.

    On CPU, 0.32 takes an existing kernel of the experts as a sign that nothing is left to pack, and goes on
    multiplying with the old weights.
    """
    if torch.cuda.is_available():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(module).__name__ == "RoutedExperts" and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # pyright: ignore[reportOptionalMemberAccess]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the bare layers in place of vLLM's LoRA wrappers; 0.26 cannot reload a base through them."""
    wrapped: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "lora_a_stacked") or _is_lora_wrapper(child):
                wrapped.append((parent, name, child))
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _is_lora_wrapper(module: nn.Module) -> bool:
    return type(module).__name__.endswith("WithLoRA") and isinstance(getattr(module, "base_layer", None), nn.Module)


# --------------------------------------------------------------------------------------------------- engine's parts


def model_runner(llm: Any) -> Any:
    """Return the object that holds model and KV cache of an in-process engine."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


@contextmanager
def reloading(llm: Any, model: nn.Module) -> Iterator[None]:
    """Bracket a reload: modules take checkpoint tensors inside, and hold repacked ones in the old memory after.

    Leaving by an exception also closes the reload, so that layers which got nothing have their old weights back.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    config = llm.llm_engine.vllm_config
    with set_current_vllm_config(config), without_adapters(model), torch.no_grad():
        before_reload(model)
        initialize_layerwise_reload(model)
        try:
            yield
        finally:
            finalize_layerwise_reload(model, config.model_config)
            _restore_released(model)


def _restore_released(model: nn.Module) -> None:
    """Declare again, as None, what a layer's packing had released: vLLM forgets it in layers that got nothing."""
    for module in model.modules():
        if hasattr(module, "quant_method"):
            for name in checkpoint_names(module):
                if not hasattr(module, name):
                    module.register_parameter(name, None)


def checkpoint_names(module: nn.Module) -> set[str]:
    """Return the names of the tensors that vLLM's loader fills in this module; repacking may rename them."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, buffers = get_layerwise_info(module).restore_metadata
    return {*parameters, *buffers, *module._parameters, *module._buffers}


def refresh_tied(llm: Any, module: nn.Module) -> None:
    """Make a module that shares its parameters with a reloaded one pack them again (CPU only)."""
    from vllm.config import set_current_vllm_config

    method = getattr(module, "quant_method", None)
    if not torch.cuda.is_available() and method is not None and hasattr(module, "cpu_linear"):
        with set_current_vllm_config(llm.llm_engine.vllm_config):
            method.process_weights_after_loading(module)


def register_adapter(llm: Any, tensors: dict[str, Tensor], config: dict[str, Any], slot: int = 1) -> None:
    """Add a LoRA adapter from tensors in memory; vLLM itself reads adapters from files only."""
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    def load(manager: Any, request: Any) -> Any:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(manager.lora_config)
        mapper = getattr(manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        for name in ("get_rename_mapper", "get_unstacked_mapper"):  # of 0.32 and 0.26
            if mapper is not None and hasattr(mapper, name):
                mapper = getattr(mapper, name)()
                break
        adapter = manager._lora_model_cls.from_lora_tensors(
            lora_model_id=request.lora_int_id,
            tensors={name: tensor.detach().clone() for name, tensor in tensors.items()},  # it scales them in place
            peft_helper=helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper,
        )
        adapter.is_3d_lora_weight = False
        return adapter

    original = WorkerLoRAManager._load_adapter
    WorkerLoRAManager._load_adapter = load  # pyright: ignore[reportAttributeAccessIssue]
    try:
        llm.llm_engine.add_lora(LoRARequest("policy", slot, "in-memory", load_inplace=True))
    finally:
        WorkerLoRAManager._load_adapter = original


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
    if vllm_sleep.hold_pools():
        _workspaces.clear()  # they lie in its pools; no other engine can use them
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
    vllm_sleep.forget_graph_pool()
    if owns_process_group:
        parallel_state.cleanup_dist_env_and_memory()
    else:
        parallel_state.destroy_model_parallel()


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
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        vllm_sleep.release_pools()


@contextmanager
def kept_generators(seed: int | None = None) -> Iterator[None]:
    """Restore the global generators on exit: vLLM draws from them even for seeded requests. `seed` seeds them first."""
    with kept_process_state():
        if seed is not None:
            torch.manual_seed(seed)
        yield
