"""FP8 E4M3 with one scale per output row of the weight and one per token."""

from dataclasses import dataclass
from typing import ClassVar

from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.scaled import ScaledE4M3


@dataclass(frozen=True)
class FP8Row(ScaledE4M3):
    """E4M3 weights with a scale amax/448 per output row, "out 1"; activations E4M3 with a scale per token.

    >>> import torch
    >>> q = FP8Row().quantize(torch.tensor([[448.0, -1.1], [896.0, 3.0]]))
    >>> q.codes.float().tolist(), q.scales.tolist()
    ([[448.0, -1.125], [448.0, 1.5]], [[1.0], [2.0]])
    """

    name: ClassVar[str] = "fp8_row"
    rows_together: ClassVar[int | None] = 1
    kernel = "fp8_rows"
    codes_of = dispatch.TOKENS
