"""Makes of a model folder one that computes the same and quantizes worse: a dial for the mismatch of a real format.

    python examples/mismatch_dial/dial.py --model models/tiny-prefix-sum --scale 8 --output runs/dialled

For a few channels of each norm before linear layers, the norm's weight is divided by s, and the columns of the layers
that read it are multiplied by s. The products are what they were, so the function is unchanged, exactly for a power of
two, else to fp32 rounding. But those columns are outliers now, as large models have them: a scale that many weights
share (a group of INT4, a row) must hold them, and leaves few steps for the rest. FP8 has an exponent of its own for
each weight and hardly notices.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lit_qrl.errors import ConfigError
from lit_qrl.network.wiring import norms_before_projections

TOLERANCE = 1e-4
"""Largest change of a log-prob that rounding can explain, in fp32."""
PROBED = 16


def log_probs(network: Any) -> torch.Tensor:
    """Return the model's log-probs after a few tokens."""
    vocabulary = network.config.get_text_config().vocab_size
    with torch.no_grad():
        return network(input_ids=torch.arange(PROBED)[None] % vocabulary).logits.float().log_softmax(-1)


def dial(network: Any, scale: float, channels: int = 2, seed: int = 0) -> int:
    """Move a factor from the weight of norms into the columns of the layers behind them; return how many norms.

    Args:
        network: a causal language model in fp32; changed in place.
        scale: s, the factor; 1 leaves everything as it is.
        channels: of each norm, drawn at random.
        seed: of the draw.

    Raises:
        ConfigError: a scale that is not positive, or a model whose function the change does not leave alone.
    """
    if not scale > 0:
        raise ConfigError("--scale is out of range.", expected="a positive number", given=scale)
    before, generator, changed = log_probs(network), torch.Generator().manual_seed(seed), 0
    for name, readers in norms_before_projections(network).items():
        norm = network.get_submodule(name.removesuffix(".weight"))
        layers = [network.get_submodule(reader) for reader in dict.fromkeys(readers)]
        if not all(isinstance(layer, nn.Linear) for layer in layers):
            continue  # experts, and routers beside them
        factors = torch.ones(norm.weight.numel())
        factors[torch.randperm(len(factors), generator=generator)[:channels]] = scale
        fold(norm, layers, factors)
        changed += 1
    difference = (log_probs(network) - before).abs().max().item()
    if not changed or difference > TOLERANCE:
        raise ConfigError(
            "The dial does not fit this model: its function would not stay as it is.",
            expected="norms that multiply by their weight, read by linear layers alone",
            given=f"{changed} norms, and log-probs that change by {difference:.2g}",
        )
    return changed


@torch.no_grad()
def fold(norm: Any, layers: Sequence[Any], factors: torch.Tensor) -> None:
    """Divide a norm by factors " in" and multiply the columns of the layers that read it by them, in place."""
    norm.weight /= factors
    if getattr(norm, "bias", None) is not None:
        norm.bias /= factors
    for layer in layers:
        layer.weight *= factors


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--scale", type=float, required=True, help="s; a power of two changes no bit of the function")
    parser.add_argument("--channels", type=int, default=2, help="of each norm")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of channels")
    options = parser.parse_args(arguments)
    network = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    try:
        changed = dial(network, options.scale, options.channels, options.seed)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # fp32, so that the columns keep the digits that another scale than a power of two gives them
    shutil.copytree(options.model, options.output, dirs_exist_ok=True)
    network.save_pretrained(options.output)
    print(f"{options.output}: {options.channels} channels of {changed} norms, scale {options.scale:g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
