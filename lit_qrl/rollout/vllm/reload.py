"""The bracket around vLLM's own reload of weights, and what must be there before it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.rollout.vllm.locations import DESCRIPTIVE
from lit_qrl.rollout.vllm.upkeep import without_adapters


@contextmanager
def reloading(llm: Any, model: nn.Module) -> Iterator[None]:
    """Bracket a reload: modules take checkpoint tensors inside, and hold repacked ones in the old memory after.

    Leaving by an exception also closes the reload, so that layers which got nothing have their old weights back.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    config = llm.llm_engine.vllm_config
    with set_current_vllm_config(config), without_adapters(model), torch.no_grad():
        reload.initialize_layerwise_reload(model)
        try:
            yield
        finally:
            reload.finalize_layerwise_reload(model, config.model_config)
            _follow_convolutions(model)


def complete(module: nn.Module, tensors: int) -> None:
    """Have vLLM process a module of which all came that will come; nothing where it has, or does not know of all yet.

    It waits until the end of the reload for parameters that no checkpoint of ours fills, such as NVFP4's scales of
    activations or an order of columns, and holds what came for every such layer until then.

    Args:
        module: of vLLM's model.
        tensors: that came for it, but for the `DESCRIPTIVE`.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(module)
    if info.can_load() and sum(name not in DESCRIPTIVE for name, _ in info.loaded_weights) >= tensors > 0:
        layerwise._layerwise_process(module, info)
        layerwise.LOADING_LAYERS.discard(module)


def _follow_convolutions(model: nn.Module) -> None:
    """Write what each convolution of a state holds into the view of it that the forward pass reads.

    In bf16 a CPU packs the convolution's weight into other memory, so that the view, made before, would keep what the
    first start had: random numbers.
    """
    for module in model.modules():
        view, held = getattr(module, "conv_weights", None), getattr(module, "conv1d", None)
        unpacked = getattr(held, "_cpu_unpacked_conv_weight", None)
        if view is not None and unpacked is not None:
            view.copy_(unpacked)


def register_head_bias(model: nn.Module, network: Any) -> None:
    """Register the bias of an output head, where vLLM does so when the bias first comes.

    A reload puts back what was there when it began, and would drop the bias.

    Args:
        model: vLLM's.
        network: the learner's Hugging Face model.
    """
    if getattr(network.get_output_embeddings(), "bias", None) is None:
        return
    for module in model.modules():
        register = getattr(module, "_register_bias", None)
        if register is not None and getattr(module, "bias", None) is None:
            with torch.device(module.weight.device):  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
                register()


@contextmanager
def same_kernel(module: nn.Module) -> Iterator[None]:
    """Keep the kernel of a module of experts while its weights are packed anew, with the scales that it reads.

    vLLM makes another kernel, of the memory that it has just packed into, and then moves what is registered back to
    where it was. Captured graphs go on reading the former scales; of those that are not registered (NVFP4's global
    ones) they would never see a new number.
    """
    method: Any = getattr(module, "quant_method", None)
    kernel, config = getattr(method, "moe_kernel", None), getattr(method, "moe_quant_config", None)
    yield
    if kernel is None or config is None or method.moe_kernel is kernel:
        return
    held, made = _numbers_of(config), _numbers_of(method.moe_quant_config)
    shapes, wanted = ({name: tuple(tensor.shape) for name, tensor in one.items()} for one in (made, held))
    if shapes != wanted:
        raise RuntimeError(f"vLLM packed experts with scales {shapes}, and the kernel that runs reads {wanted}.")
    with torch.no_grad():
        for name, tensor in held.items():
            if tensor is not made[name]:
                tensor.copy_(made[name])
    method.moe_kernel, method.moe_quant_config = kernel, config


def _numbers_of(config: Any) -> Mapping[str, Tensor]:
    """Return the tensors that a kernel of experts reads beside the weights, by name."""
    parts = {name: part for name, part in vars(config).items() if hasattr(part, "__dict__")}
    found = {f"{name}.{key}": value for name, part in parts.items() for key, value in vars(part).items()}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
