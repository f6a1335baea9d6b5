"""What a dialled policy solves when its weights are rounded, and how far it is then from itself: without sampling."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import warm_start
from addition import CHARACTERS
from torch import nn
from transformers import AutoModelForCausalLM

from lit_qrl import formats

SAMPLERS = ("bf16", "int4_group", "nvfp4")
SOLVED = 0.15
"""What a sampler must solve for a reward to learn from."""


@torch.no_grad()
def probe(
    models: Path, names: Sequence[str], device: str, recipe: warm_start.Recipe | None = None
) -> dict[str, dict[str, float]]:
    """Return for each position of the dial what the policy solves in some formats, and how far they are from bf16.

    Args:
        models: folder of the dialled policies.
        names: of the policies in it.
        device: to compute on.
        recipe: that the policy was made with.

    Both are computed on the right traces of held-out problems: the probability that a sampled one has no error, and
    mean |log-ratio| of their tokens in nats. Weights alone are rounded, the embedding is not.
    """
    tokenizer = warm_start.build_tokenizer(CHARACTERS)
    teacher = warm_start.Teacher(recipe or warm_start.Recipe(), tokenizer, held_out=True, seed=0)
    tokens, labels = (part.to(device) for part in teacher.batch(warm_start.CHECKED))
    there = labels[:, 1:] != -100
    found: dict[str, dict[str, float]] = {}
    for name in names:
        base: torch.Tensor | None = None
        for sampler in SAMPLERS:
            network: Any = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32).to(device)
            format = formats.get(sampler)
            for layer in (layer for layer in network.model.modules() if isinstance(layer, nn.Linear)):
                layer.weight.data = format.dequantize(format.quantize(layer.weight.data), torch.float32)
            logits = network(input_ids=tokens, use_cache=False).logits[:, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0] * there
            base = chosen if base is None else base
            cells = found.setdefault(name, {})
            cells[f"{sampler}_solved"] = chosen.sum(1).exp().mean().item()
            cells[f"{sampler}_log_ratio"] = ((chosen - base).abs().sum() / there.sum()).item()
    return found


def choose(probed: Mapping[str, Mapping[str, float]]) -> str:
    """Return the furthest position of the dial at which INT4's sampler still solves enough to learn from.

    >>> choose({"s1": {"int4_group_solved": 0.5}, "s2": {"int4_group_solved": 0.2}, "s4": {"int4_group_solved": 0.1}})
    's2'
    """
    return [name for name, cells in probed.items() if cells["int4_group_solved"] >= SOLVED or name == "s1"][-1]
