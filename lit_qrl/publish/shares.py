"""How much of a model its sampler has in a number format, and how much of it was verified."""

import math
from collections.abc import Mapping

from lit_qrl.receipts.ledger import Ledger, PublishReport


def weigh(report: PublishReport, sent: Ledger, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Write sizes and shares into the report of a whole publish.

    Args:
        report: of the engine.
        sent: the sender's ledger.
        shapes: (out, in) of the layers that went out in a format of 8 bits or less.
    """
    read = set() if report.received is None else set(sent.sizes) - set(report.received.unread)
    whole = sum(size for _, size in sent.sizes.values())
    report.verified_share = sum(sent.sizes[name][1] for name in read) / max(whole, 1)
    quantized, plain = sum(math.prod(shape) for shape in shapes.values()), 0
    for name, (numbers, size) in sent.sizes.items():
        layer = name.partition(".weight")[0]
        if layer not in shapes or name == f"{layer}.bias":
            plain += numbers
        key = name if name in report.layers else f"{layer}.weight"
        report.sizes[key] = report.sizes.get(key, 0) + size
    report.quantized_share = quantized / max(quantized + plain, 1)
