r"""Scaling of input channels before rounding: channels with large activations are made larger in the weight (AWQ).

Lin et al., *AWQ: Activation-aware Weight Quantization*, arXiv:2306.00978, which QeRL §4.1 applies to NVFP4 and MXFP4.
For layers W₁, W₂, … with a common input X ("in tokens") and s_j = (mean |x_j|)^α, α is the point of a grid on [0, 1]
with the least

    L(α) = Σᵢ ‖Q(Wᵢ · diag(s)) · (diag(s)⁻¹ X) − Wᵢ X‖²

and diag(s)⁻¹ goes into whatever makes X: the weight of a norm, or the rows of a linear layer. The model computes the
same function as before; only the rounding differs. α = 0 is plain rounding, so L never rises.

With G = X Xᵀ / tokens ("in in") and Dᵢ = Q(Wᵢ diag(s)) diag(s)⁻¹ − Wᵢ, L = Σᵢ tr(Dᵢ G Dᵢᵀ): all calibration tokens
count, and none has to be kept.

In a mixture of experts the first matrices of all experts are W₁, W₂, …: each is measured on all tokens of the layer,
whichever its router sends there. The router reads the same X, so that its columns are scaled, too, and not rounded. An
expert's last matrix is measured on the tokens that come to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_qrl.formats.base import NumberFormat

GRID = 20
"""Steps of α on [0, 1]; the authors' search has as many."""
_SMALLEST = 1e-4
"""Channels that are never active would get a scale of 0; the authors' search has the same floor."""


class InputStatistics:
    """Mean |x| " in" and G = X Xᵀ / tokens "in in" of a layer's input, over everything given to `add`."""

    def __init__(self) -> None:
        self.tokens = 0
        self._magnitude: Tensor | None = None
        self._gram: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Count inputs "... in"."""
        rows = x.detach().reshape(-1, x.shape[-1])
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if self._magnitude is None or self._gram is None:
            self._magnitude = rows.new_zeros(rows.shape[1])
            self._gram = rows.new_zeros(rows.shape[1], rows.shape[1])
        self._magnitude += rows.abs().sum(dim=0)
        self._gram.addmm_(rows.T, rows)
        self.tokens += len(rows)

    @property
    def magnitude(self) -> Tensor:
        """Mean |x| per channel, " in"."""
        assert self._magnitude is not None
        return self._magnitude / self.tokens

    @property
    def gram(self) -> Tensor:
        """X Xᵀ / tokens, "in in"."""
        assert self._gram is not None
        return self._gram / self.tokens


def channel_scales(magnitude: Tensor, alpha: float) -> Tensor:
    """Return s = (mean |x|)^α " in", divided by sqrt(max s · min s): formats see factors around 1.

    Args:
        magnitude: mean |x| per channel, " in", not negative.
        alpha: in [0, 1]; 0 gives exactly 1.

    >>> channel_scales(torch.tensor([1.0, 4.0, 16.0]), 0.5)
    tensor([0.5000, 1.0000, 2.0000])
    """
    scales = magnitude.clamp(min=_SMALLEST).pow(alpha)
    return scales / (scales.amax() * scales.amin()).sqrt()


def rounded(format: NumberFormat, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return what the format makes of weights that an engine fuses, multiplied out in fp32."""
    shared = None
    if format.shares_amax and len(weights) > 1:
        shared = torch.stack([weight.abs().amax() for weight in weights]).amax()
    return [format.dequantize(format.quantize(weight, shared), torch.float32) for weight in weights]


def reconstruction_loss(format: NumberFormat, weights: Sequence[Tensor], gram: Tensor, scales: Tensor) -> float:
    """Return Σᵢ ‖Q(Wᵢ diag(s)) diag(s)⁻¹ X − Wᵢ X‖² per token (the loss above).

    Args:
        format: the weight-only format.
        weights: "out in" each, with the same inputs; they share a scale where the format shares it.
        gram: X Xᵀ / tokens, "in in".
        scales: s, " in".
    """
    total = 0.0
    scaled = [scale_columns(weight, scales) for weight in weights]
    for weight, made in zip(weights, rounded(format, scaled), strict=True):
        difference = (made.to(gram.dtype) / scales.to(gram.dtype)) - weight.to(gram.dtype)
        total += float(((difference @ gram) * difference).sum())
    return total


def scale_columns(weight: Tensor, scales: Tensor) -> Tensor:
    """Return W · diag(s) in the dtype of W, multiplied in at least fp32."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) * scales.to(wide)).to(weight.dtype)


@dataclass(frozen=True)
class Found:
    """The best α of one group of layers.

    Args:
        layers: names of the layers with this input.
        producer: name of what the inverse scale went into.
        alpha: the exponent.
        loss: L(α).
        plain_loss: L(0), plain rounding.
    """

    layers: tuple[str, ...]
    producer: str
    alpha: float
    loss: float
    plain_loss: float


def search(
    format: NumberFormat, weights: Sequence[Sequence[Tensor]], statistics: InputStatistics, grid: int = GRID
) -> tuple[float, Tensor, float, float]:
    """Return the best α, its scales " in", L(α) and L(0).

    Args:
        format: the weight-only format.
        weights: "out in" each, with the same inputs, in groups that share a scale where the format shares it.
        statistics: of those inputs.
        grid: steps of α on [0, 1].
    """
    magnitude, gram = statistics.magnitude, statistics.gram
    best: tuple[float, Tensor, float] | None = None
    plain = 0.0
    for step in range(grid + 1):
        scales = channel_scales(magnitude, step / grid)
        loss = sum(reconstruction_loss(format, group, gram, scales) for group in weights)
        if step == 0:
            plain = loss
        if best is None or loss < best[2]:
            best = (step / grid, scales, loss)
    assert best is not None
    return *best, plain


@torch.no_grad()
def fold(producer: nn.Module, consumers: Sequence[nn.Module], scales: Tensor) -> None:
    """Multiply the consumers' columns by s and divide what the producer puts out by s, in place.

    What a norm's weight rounds to in its own dtype decides the scale that the columns really get, so that the product
    is as it was even where the norm is in bf16.

    Args:
        producer: a norm with a weight " in", or a linear layer with "in" outputs.
        consumers: the layers that read its output, linear ones and routers.
        scales: s, " in".
    """
    weight: Tensor = producer.weight  # pyright: ignore[reportAssignmentType]
    wide = torch.promote_types(weight.dtype, torch.float32)
    scales = scales.to(device=weight.device, dtype=wide)
    if weight.dim() == 1:
        before = weight.to(wide)
        after = (before / scales).to(weight.dtype).to(wide)
        exact = (before != 0) & (after != 0) & torch.isfinite(after)
        scales = torch.where(exact, before / torch.where(exact, after, 1.0), scales)
        weight.copy_(torch.where(exact, after, before / scales).to(weight.dtype))
    else:
        weight.copy_((weight.to(wide) / scales[:, None]).to(weight.dtype))
    bias = getattr(producer, "bias", None)
    if bias is not None:
        bias.copy_((bias.to(wide) / scales).to(bias.dtype))
    for consumer in consumers:
        read: Tensor = consumer.weight  # pyright: ignore[reportAssignmentType]
        read.copy_(scale_columns(read, scales))
