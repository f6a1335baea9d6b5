"""Rejections by the mismatch between learner and sampler: which tokens stay in the loss.

`d` is the log-ratio learner_old − sampler, "b t", in nats, exactly 0 where `mask` is False; ρ = e^d. Keeps are True
where `mask` is False. Log-ratios are never clamped.
"""

import math
from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from lit_qrl.errors import check_choice
from lit_qrl.functional._checks import Bound, check_above, check_band, check_divergence, check_veto
from lit_qrl.functional._statistics import as_float, row_means
from lit_qrl.functional.mismatch import k3_divergence

LogRatio = Float[Tensor, "b t"]
Divergence = Literal["k1", "k2", "k3"]
Over = Literal["token", "mean", "sum", "max"]


def ratio_keep(
    d: LogRatio,
    mask: Bool[Tensor, "b t"],
    lower: float | None,
    upper: Bound,
    divergence: Divergence = "k1",
    over: Over = "mean",
) -> Bool[Tensor, "b t"]:
    """Return True on the tokens, or on all tokens of the sequences, whose ratio is close enough to 1.

    What is compared with the bounds is, of a token or over a sequence,

    - `k1`: ρ itself, with Π ρ_t for `sum`, (Π ρ_t)^(1/T) for `mean` (Geo-RS), and every ρ_t for `max`;
    - `k2`: d² / 2, nats, with the upper bound alone;
    - `k3`: e^d − 1 − d, nats, with the upper bound alone.

    These are verl's `rollout_rs` options (`token_k1`, `seq_mean_k3`, …) and AReaL's `rejection_sampling`. k1's band is
    on ρ = learner_old / sampler; verl's is on −d, so that its "lo_hi" is lower = 1/hi, upper = 1/lo here.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        lower: of k1's band, in [0, 1], None is 1/upper; None for k2 and k3.
        upper: of k1's band, at least 1; of k2 and k3, positive, in nats.
        divergence: `k1`, `k2` or `k3`.
        over: `token` rejects single tokens; `mean`, `sum` and `max` over a sequence reject it as a whole.

    Raises:
        ConfigError: bounds out of range; an unknown divergence or `over`.

    >>> import torch
    >>> d = torch.tensor([[0.1, -0.3], [0.0, 0.1]])
    >>> ratio_keep(d, torch.ones(2, 2, dtype=torch.bool), None, 0.01, "k3", "mean")
    tensor([[False, False],
            [ True,  True]])
    """
    check_choice("divergence", divergence, ("k1", "k2", "k3"))
    check_choice("over", over, ("token", "mean", "sum", "max"))
    d = as_float(d)
    values = d.square() / 2 if divergence == "k2" else k3_divergence(d) if divergence == "k3" else d
    if over == "mean":
        values = row_means(mask, values)[:, None]
    elif over == "sum":
        values = values.sum(dim=1, keepdim=True)
    if divergence == "k1":
        bottom = check_band(lower, upper)
        ratios = values.exp()
        keep = (ratios >= bottom) & (ratios <= upper) | ~mask
    else:
        check_divergence(lower, upper)
        keep = (values <= upper) | ~mask
    return keep.all(dim=1, keepdim=True) | ~mask if over == "max" else keep


def token_veto(d: LogRatio, mask: Bool[Tensor, "b t"], threshold: float = 1e-4) -> Bool[Tensor, "b t"]:
    """Return False on all tokens of a sequence in which any token's ratio e^d is below the threshold.

    The "catastrophic token" veto of the survey's implementations.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        threshold: on the ratio, in (0, 1).

    Raises:
        ConfigError: a threshold outside (0, 1).

    >>> import torch
    >>> token_veto(torch.tensor([[0.0, -10.0]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[False, False]])
    """
    check_veto(threshold)
    vetoed = ((as_float(d) < math.log(threshold)) & mask).any(dim=1, keepdim=True)
    return ~vetoed | ~mask


def opsm_keep(
    d: LogRatio, mask: Bool[Tensor, "b t"], advantages: Float[Tensor, " b"], delta: float
) -> Bool[Tensor, "b t"]:
    """Return False on all tokens of a sequence with a negative advantage that drifted off policy.

    Keep if A >= 0 or mean_t(sampler − learner_old) <= delta: the off-policy sequence mask of recent peers, on the
    learner at the moment of the rollout (theirs compares with the learner of the current step).

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        advantages: " b".
        delta: mean drift, nats per token, positive.

    Raises:
        ConfigError: `delta` not positive.

    >>> import torch
    >>> opsm_keep(torch.tensor([[-0.2], [-0.2]]), torch.ones(2, 1, dtype=torch.bool), torch.tensor([1.0, -1.0]), 0.1)
    tensor([[ True],
            [False]])
    """
    check_above(0.0, delta=delta)
    drift = -row_means(mask, as_float(d))[:, None]
    return (advantages[:, None] >= 0) | (drift <= delta) | ~mask
