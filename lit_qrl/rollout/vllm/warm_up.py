"""What the first publish runs, run once before it on a few numbers, so that it need not wait for compilers."""

from typing import TYPE_CHECKING

import torch

from lit_qrl.network.stream import weight_stream
from lit_qrl.receipts import checksum
from lit_qrl.receipts.ledger import SentLedger

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat

# Inputs and outputs of the layer: a multiple of every block, group and tile, as those of large models are.
SIDE = 256


def warm_up(format: "NumberFormat | None", learner: torch.dtype, sent: torch.dtype, device: torch.device) -> list[str]:
    """Return the names of the tensors that a small layer and a norm were published as, to nobody.

    It compiles the quantizer, the kernels of the ledger, and what multiplies sampled columns out; nothing is drawn.

    Args:
        format: of the sampler.
        learner: dtype of the learner's weights.
        sent: dtype of what is not quantized.
        device: of the learner's weights.

    >>> from lit_qrl.formats import get
    >>> warm_up(get("fp8_row"), torch.float32, torch.bfloat16, torch.device("cpu"))
    ['layer.weight', 'layer.weight_scale', 'norm.weight']
    """
    checksum.warm_up(device)
    try:
        if format is not None:
            format.check("layer", (SIDE, SIDE))
    except ValueError:  # a rare group size; its first publish compiles
        return []
    # Ones: a layer of zeros would be refused by no format either, but takes a format's special cases.
    layer = torch.ones(SIDE, SIDE, dtype=learner, device=device)
    weights = iter([("layer.weight", layer), ("norm.weight", layer[0].clone())])
    ledger = SentLedger(0, format, {"layer": (SIDE, SIDE)})
    for _ in ledger.watch(weight_stream(weights, format, ["layer"], sent)):
        pass
    return list(ledger.receipts())
