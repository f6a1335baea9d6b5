"""What engines that hold an adapter beside its base read of it: both factors of each layer, and what scales them."""

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lit_qrl.receipts.ledger import Fault, PublishError, ReceivedLedger

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


def factors(tensors: Iterator[tuple[str, Tensor]], ledger: ReceivedLedger) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors A "rank in" and B "out rank" of each layer, by its name in the checkpoint.

    Args:
        tensors: PEFT's checkpoint names (`base_model.model.<layer>.lora_A.weight`) and tensors.
        ledger: of the engine; a name that comes twice is noted in it.

    Raises:
        PublishError: when one of a layer's two factors is missing.
    """
    given: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in given:
            ledger.record(name, tensor)
        given[name] = tensor
    layers = sorted({name.removesuffix(A).removesuffix(B) for name in given})
    lacking = [layer + end for layer in layers for end in (A, B) if layer + end not in given]
    if lacking:
        raise PublishError([Fault("missing", name) for name in lacking], ledger.version)
    return {layer.removeprefix(PREFIX): (given[layer + A], given[layer + B]) for layer in layers}


def scaling(config: Any, layer: str, rank: int) -> float:
    """Return the factor of the low-rank term: α / rank, or α / √rank for rank-stabilised LoRA.

    Args:
        config: the policy's PEFT config.
        layer: name of the adapted layer, which `alpha_pattern` may give an α of its own.
        rank: of its factors.

    >>> from peft import LoraConfig
    >>> scaling(LoraConfig(r=4, lora_alpha=8), "q_proj", 4)
    2.0
    """
    from peft.utils.other import get_pattern_key

    patterns = getattr(config, "alpha_pattern", None) or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config.lora_alpha)
    return alpha / (math.sqrt(rank) if getattr(config, "use_rslora", False) else rank)
