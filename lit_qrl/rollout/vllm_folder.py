"""The folder that a vLLM engine starts from: a config alone, whose weights come by publishing."""

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_qrl.precision.formats.nf4 import NF4
from lit_qrl.rollout import vllm_nf4
from lit_qrl.rollout.vllm_checks import plain_layers

if TYPE_CHECKING:
    from lit_qrl.precision.formats.base import NumberFormat


def model_folder(
    network: Any,
    format: "NumberFormat | None",
    exclude: Collection[str],
    head: bool,
    dtype: torch.dtype,
    longest: int,
) -> Path:
    """Return a new folder with the config of `network` as the sampler computes it.

    Args:
        network: the learner's Hugging Face model.
        format: of the quantized layers.
        exclude: name patterns of layers that stay plain.
        head: True when the output head is quantized too.
        dtype: of everything that is not quantized.
        longest: sequence in tokens that positions must reach for.
    """
    config = network.config.to_dict()
    config["architectures"] = [type(network).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("quantization_config", None)
    if format is not None:
        if isinstance(format, NF4):
            vllm_nf4.check_shapes(network, exclude)
        quantization = vllm_nf4.quantization_config(format, plain_layers(network, exclude, head))
        if quantization:
            config["quantization_config"] = quantization
            for group in quantization.get("config_groups", {}).values() if head else ():
                group["targets"].append("lm_head")  # which is no `Linear` to vLLM
    if (config.get("max_position_embeddings") or longest) < longest:
        config["max_position_embeddings"] = longest
    folder = Path(tempfile.mkdtemp(prefix="lit-qrl-vllm-"))
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder
