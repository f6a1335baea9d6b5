"""What is checked before a vLLM engine is built, with numbers and a remedy."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.precision.surgery import fused_groups, quantizable_linears

if TYPE_CHECKING:
    from lit_qrl.precision.formats.base import NumberFormat

# What the CPU build of vLLM has kernels for without AMX.
cpu_formats: set[str] = {"bf16", "fp16", "fp32", "fp8_tensor", "fp8_row", "int8_channel", "int4_group"}
# Those of them whose GEMM has no fp32 activations.
half_only = frozenset({"int4_group"})
cuda_formats: set[str] = cpu_formats | {"fp8_block", "nvfp4", "mxfp4"}


def automatic_dtype(format: "NumberFormat | None", learner: torch.dtype) -> torch.dtype:
    """Return the engine's dtype: the format's or the learner's own, bf16 where kernels take nothing else.

    >>> from lit_qrl.precision import formats
    >>> automatic_dtype(formats.get("bf16"), torch.float32), automatic_dtype(None, torch.float32)
    (torch.bfloat16, torch.float32)
    """
    if format is None or not format.quantization_config():
        return getattr(format, "dtype", learner)
    takes_float32 = not torch.cuda.is_available() and format.name not in half_only
    return learner if takes_float32 or learner != torch.float32 else torch.bfloat16


def check_format(format: "NumberFormat | None") -> None:
    """Raise `ConfigError` for a format that vLLM has no kernel for on this host."""
    device, known = ("CUDA", cuda_formats) if torch.cuda.is_available() else ("CPU", cpu_formats)
    if format is not None and format.name not in known:
        raise ConfigError(
            f"vLLM on {device} has no kernel for publisher.format {format.name}.",
            expected=", ".join(sorted(known)),
            given=format.name,
            remedy="Choose one of these, or use TransformersEngine, which computes every format.",
        )
    if format is not None and format.name == "int4_group" and format.quantizes_activations and device == "CPU":
        raise ConfigError(
            "vLLM on CPU has no kernel for 4-bit weights under 8-bit activations.",
            expected="int4_group.activations: null",
            remedy="Leave the activations alone, or use TransformersEngine.",
        )


def check_model(network: nn.Module) -> None:
    """Raise `ConfigError` for a model type that the installed vLLM lacks."""
    from vllm.model_executor.models.registry import ModelRegistry

    name = type(network).__name__
    if name not in ModelRegistry.get_supported_archs():
        raise ConfigError(
            f"The installed vLLM does not know the model type {name}.",
            expected="an architecture of vLLM's list of supported models",
            given=name,
            remedy="Install a newer vLLM, or use TransformersEngine.",
        )


def check_device_memory(network: nn.Module, bits_per_weight: float, share: float) -> None:
    """Raise `ConfigError` when the GPU cannot hold engine and learner, with how much each takes.

    Args:
        network: the learner's model, already in memory.
        bits_per_weight: of the sampler's format.
        share: the part of the GPU's memory that the engine asks for.
    """
    free, total = torch.cuda.mem_get_info()
    asked = share * total
    weights = sum(p.numel() for p in network.parameters()) * bits_per_weight / 8
    learner = torch.cuda.memory_allocated()
    if asked > free:
        raise ConfigError(
            "The GPU has not enough memory for the engine beside the learner.",
            expected=f"{asked / 2**30:.1f} GiB free for data.engine.gpu_memory_utilization {share:g}",
            given=f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free; the learner holds {learner / 2**30:.1f} GiB",
            remedy=f"Lower it to at most {free / total * 0.98:.2f}; the sampler's weights take "
            f"{weights / 2**30:.1f} GiB of it.",
        )
    # A tenth for activations and at least some KV cache.
    if weights > 0.9 * asked:
        raise ConfigError(
            "The engine's share of the GPU's memory cannot hold its weights and a KV cache.",
            expected=f"more than {weights / 0.9 / 2**30:.1f} GiB",
            given=f"{asked / 2**30:.1f} GiB (data.engine.gpu_memory_utilization {share:g})",
            remedy="Raise it, or publish in a format of fewer bits.",
        )


def plain_layers(network: nn.Module, exclude: Collection[str]) -> list[str]:
    """Return the linear layers that stay unquantized, as a `quantization_config` lists them.

    Args:
        network: the learner's model.
        exclude: name patterns of the publisher.

    Raises:
        ConfigError: when only a part of the layers that vLLM fuses is excluded.
    """
    quantized = set(quantizable_linears(network, exclude))
    linears = [name for name, module in network.named_modules() if _is_linear(module) and ".lora_" not in name]
    for fused, members in fused_groups(linears).items():
        inside = [name for name in members if name in quantized]
        if inside and len(inside) < len(members):
            raise ConfigError(
                f"publisher.exclude splits {fused}, which vLLM holds as one layer.",
                expected=f"all or none of {', '.join(members)}",
                given=f"{', '.join(inside)} quantized",
                remedy="Exclude the whole group.",
            )
    plain = [name.removesuffix(".base_layer") for name in linears if name not in quantized]
    return plain if "lm_head" in plain else [*plain, "lm_head"]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)
