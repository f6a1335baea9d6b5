"""Adaptive importance sampling (AIS): how strongly to correct, decided from each mini-batch."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_qrl.functional._checks import check_ais, check_band
from lit_qrl.functional._statistics import as_float, masked, precise
from lit_qrl.types import AllReduce, no_all_reduce

Level = Literal["token", "sequence"]


class AISGate(NamedTuple):
    """The mixing coefficient and what it is made of, 0-dim tensors; numbers in brackets are AIS equations.

    Args:
        alpha: clip(reliability − sensitivity · variance_penalty, 0, 1) · necessity (17).
        reliability: α_ess = sqrt(ess_ratio) (12).
        necessity: α_mis = min(1, mean_abs_log_ratio / saturation) (14).
        variance_penalty: α_var = max(0, (amplification − tolerance) / tolerance) (16).
        amplification: Δσ = std(A·w̄) / (std(A) + eps) (15).
        mean_abs_log_ratio: d̄, nats (13).
        ess_ratio: 1 / (1 + CV²) of the clipped weights (12).
        truncated: share of the weights above the clip.
    """

    alpha: Float[Tensor, ""]
    reliability: Float[Tensor, ""]
    necessity: Float[Tensor, ""]
    variance_penalty: Float[Tensor, ""]
    amplification: Float[Tensor, ""]
    mean_abs_log_ratio: Float[Tensor, ""]
    ess_ratio: Float[Tensor, ""]
    truncated: Float[Tensor, ""]


def ais_gate(
    d: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    clip: float = 5.0,
    saturation: float = 0.02,
    tolerance: float = 1.2,
    sensitivity: float = 1.0,
    eps: float = 1e-6,
    *,
    level: Level = "token",
    all_reduce: AllReduce = no_all_reduce,
) -> AISGate:
    """Return the mixing coefficient α of one mini-batch and its three signals.

    AIS eqs. 12–17 with sample standard deviations (ddof = 1) over masked tokens; an advantage counts once per token.
    d̄ is the mean |Δ log p| of eq. 13, not the E|Δp| that the text under Fig. 4 equates with it. The paper gives no
    value for β, here `sensitivity`. Detached. With `level="sequence"` weights are e^(Σ d) and their statistics run
    over sequences; d̄ stays per token, as eq. 13 says.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        advantages: " b".
        clip: C >= 1, bound of the weights (10).
        saturation: δ > 0, the mean |log-ratio| from which the correction is in full force (14), nats.
        tolerance: γ > 0, the amplification that is let pass (16).
        sensitivity: β >= 0, how much the variance penalty counts (17).
        eps: ε > 0, added to std(A) (15).
        level: what one weight belongs to.
        all_reduce: makes all sums global over ranks.

    Raises:
        ConfigError: a parameter out of range.

    >>> d, mask = torch.tensor([[0.01, -0.01]]), torch.ones(1, 2, dtype=torch.bool)
    >>> round(float(ais_gate(d, mask, torch.tensor([1.0])).necessity), 4)
    0.5
    """
    check_ais(clip, saturation, tolerance, sensitivity, eps, level)
    d = precise(d.detach())
    units, unit_d = (mask, d) if level == "token" else (mask.any(dim=1, keepdim=True), d.sum(dim=1, keepdim=True))
    ratio = unit_d.exp()
    w = ratio.clamp(max=clip)
    sums = masked(units, torch.stack([w, w.square(), (ratio > clip).to(w.dtype)])).sum(dim=2)
    counts = torch.stack([units.sum(dim=1), mask.sum(dim=1)]).to(w.dtype)
    # An advantage is the same for a whole row, so every moment with it comes from the row's sums.
    rows = torch.cat([counts, sums, d.abs().sum(dim=1)[None]])
    a = precise(advantages.detach())
    powers = torch.stack([torch.ones_like(a), a, a.square()])
    count, tokens, first, second, cut, abs_d = all_reduce((rows[:, None] * powers).sum(dim=2)).unbind()
    n, tokens = count[0].clamp(min=1), tokens[0].clamp(min=1)
    mean_w, mean_w2, mean_abs = first[0] / n, second[0] / n, abs_d[0] / tokens
    # Means and squares of w, A and A·w.
    means = torch.stack([first[0], count[1], first[1]]) / n
    variances = torch.stack([second[0], count[2], second[2]]) / n - means.square()
    var_w, var_a, var_aw = (variances.clamp(min=0) * (n / (n - 1).clamp(min=1))).unbind()
    # 1 / (1 + CV²) with both sides multiplied by mean², which may underflow: then all weights are 0, hence equal.
    ess_ratio = torch.where(mean_w2 > 0, mean_w.square() / (mean_w.square() + var_w), 1.0)
    amplification = var_aw.sqrt() / (var_a.sqrt() + eps)
    variance_penalty = ((amplification - tolerance) / tolerance).clamp(min=0)
    necessity = (mean_abs / saturation).clamp(max=1)
    reliability = ess_ratio.sqrt()
    alpha = (reliability - sensitivity * variance_penalty).clamp(0, 1) * necessity
    dtype = torch.float64 if advantages.dtype == torch.float64 else torch.float32
    fields = (alpha, reliability, necessity, variance_penalty, amplification, mean_abs, ess_ratio, cut[0] / n)
    return AISGate(*torch.stack(fields).to(dtype).unbind())


class AISOracle(NamedTuple):
    """The mixing coefficient that minimises the error of the gradient, 0-dim tensors (AIS, Proposition 1).

    Args:
        simplified: ‖b0‖² / (‖b0‖² + σ1²) (26), as the paper writes it where σ1² outweighs σ0² and κ.
        exact: (‖b0‖² + σ0² − κ) / (‖b0‖² + σ0² + σ1² − 2κ) (25).
    """

    simplified: Float[Tensor, ""]
    exact: Float[Tensor, ""]


def ais_oracle(
    d: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    clip: float = 5.0,
    *,
    level: Level = "token",
    all_reduce: AllReduce = no_all_reduce,
) -> AISOracle:
    """Return Proposition 1's α* of one mini-batch, with scores of one direction and length.

    Scores s(x) take a backward pass each, so that A·s(x) is A here, as Δσ (15) has it: b0 = mean(A) − mean(w A) is the
    bias without correction, σ1² = Var(w̄ A) and σ0² = Var(A) are per sample, as in the paper, κ = Cov(A, w̄ A), and the
    bias b1 of the clip is taken for 0 (A4). Both are 0 where learner and sampler agree. Detached.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        advantages: " b".
        clip: C >= 1 of w̄ = min(w, C).
        level: what one weight belongs to.
        all_reduce: makes all sums global over ranks.

    >>> d, mask = torch.tensor([[0.5, -0.5]]), torch.ones(1, 2, dtype=torch.bool)
    >>> [round(float(one), 3) for one in ais_oracle(d, mask, torch.tensor([1.0]))]
    [0.057, 0.057]
    """
    check_band(0.0, clip, what="The clip of AIS")
    d = precise(d.detach())
    units, d = (mask, d) if level == "token" else (mask.any(dim=1, keepdim=True), d.sum(dim=1, keepdim=True))
    w = d.exp()
    a = precise(advantages.detach())[:, None].expand_as(w)
    clipped = w.clamp(max=clip) * a
    products = [torch.ones_like(w), a, w * a, clipped, a.square(), clipped.square(), a * clipped]
    n, *sums = all_reduce(masked(units, torch.stack(products)).sum(dim=(1, 2))).unbind()
    mean_a, mean_wa, mean_clipped, a2, clipped2, cross = (total / n.clamp(min=1) for total in sums)
    bias2 = (mean_a - mean_wa).square()
    var0, var1, cov = a2 - mean_a.square(), clipped2 - mean_clipped.square(), cross - mean_a * mean_clipped
    simplified = torch.where(bias2 > 0, bias2 / (bias2 + var1.clamp(min=0)), 0.0)
    whole = bias2 + var0 + var1 - 2 * cov
    exact = torch.where(bias2 > 0, ((bias2 + var0 - cov) / whole).clamp(0, 1), 0.0)
    return AISOracle(simplified.to(advantages.dtype), exact.to(advantages.dtype))


def ais_weights(
    d: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    alpha: float | Float[Tensor, ""],
    clip: float = 5.0,
    *,
    level: Level = "token",
) -> Float[Tensor, "b t"]:
    """Return the rectification weights 1 + α (min(e^d, C) − 1), AIS eq. 18.

    At most 1 + α (C − 1) (Proposition 2); α = 0 is no correction, α = 1 is truncated importance sampling.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        alpha: in [0, 1], from `ais_gate`.
        clip: C >= 1.
        level: "sequence" takes e^(Σ d) instead, on every token of the sequence.

    Raises:
        ConfigError: a clip below 1.

    >>> ais_weights(torch.tensor([[3.0]]), torch.ones(1, 1, dtype=torch.bool), 0.5)
    tensor([[3.]])
    """
    check_band(0.0, clip, what="The clip of AIS")
    d = as_float(d.detach())
    if level == "token":
        return 1 + alpha * (d.exp().clamp(max=clip) - 1)
    return masked(mask, 1 + alpha * (d.sum(dim=1, keepdim=True).exp().clamp(max=clip) - 1), 1.0)
