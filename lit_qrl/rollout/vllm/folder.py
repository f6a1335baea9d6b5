"""The folder that a vLLM engine starts from: a config alone, whose weights come by publishing."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from lit_qrl.formats.base import NumberFormat
from lit_qrl.rollout.vllm.checks import plain_layers
from lit_qrl.rollout.vllm.models import further_keys

_made: dict[Path, int] = {}
"""Folders that are left, and the processes that made them: a child that was forked off removes none."""


def model_folder(
    network: Any,
    format: NumberFormat | None,
    exclude: Collection[str],
    head: bool,
    dtype: torch.dtype,
    longest: int,
) -> Path:
    """Return a new folder with the config of `network` as the sampler computes it; it goes with the process at latest.

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
    if any(name.endswith(".e_score_correction_bias") for name, _ in network.named_buffers()):
        # A router with that bias scores by sigmoids and adds it; vLLM asks the config, where transformers drops both.
        for key, value in {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}.items():
            config.setdefault(key, value)
    if config.get("sliding_window"):
        config["sliding_window"] -= further_keys(type(network).__name__)
    if format is not None:
        quantization = format.quantization_config(plain_layers(network, exclude, head))
        if quantization:
            config["quantization_config"] = quantization
            for group in quantization.get("config_groups", {}).values() if head else ():
                group["targets"].append("lm_head")  # which is no `Linear` to vLLM
    if (config.get("max_position_embeddings") or longest) < longest:
        config["max_position_embeddings"] = longest
    folder = Path(tempfile.mkdtemp(prefix="lit-qrl-vllm-"))
    _made[folder] = os.getpid()
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def remove(folder: Path) -> None:
    """Remove a folder that `model_folder` made."""
    if _made.pop(folder, None) == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def keep(folder: Path) -> None:
    """Leave a folder to another process, which this one becomes or starts."""
    _made.pop(folder, None)


@atexit.register
def remove_all() -> None:
    """Remove the folders of engines that nobody closed, at the end of the process."""
    for folder in list(_made):
        remove(folder)
