"""The `quantization_config` of a Hugging Face config.json, in the words of compressed-tensors."""

from collections.abc import Mapping, Sequence
from typing import Any


def compressed_tensors_config(
    format: str,
    *,
    weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = ("lm_head",),
) -> dict[str, Any]:
    """Return a compressed-tensors `quantization_config` with one group that takes every linear layer.

    Args:
        format: the compressor's name, such as `float-quantized`.
        weights: bits, type, strategy, and where they apply group_size, block_structure, scale_dtype.
        activations: the same of dynamically quantized inputs, or None for weight-only.
        ignore: names of layers that stay as they are.
    """
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": None if activations is None else {"symmetric": True, "dynamic": True, **activations},
        "output_activations": None,
        "format": format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }
