"""Advantages from the rewards of groups of completions, and the shaping of rewards that comes before."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_qrl.errors import check_choice
from lit_qrl.functional._statistics import as_float
from lit_qrl.types import AllReduce, no_all_reduce

Baseline = Literal["group", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]


def differing(groups: Float[Tensor, "g n"]) -> Bool[Tensor, " g"]:
    """Return for each group whether its rewards differ; NaN is no reward.

    >>> differing(torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, torch.nan]]))
    tensor([ True, False, False])
    """
    given = ~groups.isnan()
    highest = torch.where(given, groups, -torch.inf).amax(dim=1)
    return highest > torch.where(given, groups, torch.inf).amin(dim=1)


def group_advantages(
    rewards: Float[Tensor, " b"],
    group_size: int,
    scale: Scale = "group",
    eps: float = 1e-6,
    baseline: Baseline = "group",
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> Float[Tensor, " b"]:
    """Return each completion's reward minus a baseline of its group, scaled.

    A_i = (r_i − mean(r)) / (std(r) + eps); `scale="group"` is GRPO (QaRL §2.1), "none" is Dr.GRPO (AIS eq. 3). With the
    baseline `leave_one_out` the mean is that of the others, r_i − Σ_{j≠i} r_j / (G − 1) (RLOO, Ahmadian et al. 2024),
    which is G / (G − 1) times as much. A group of equal rewards gives exactly 0: rounding of its mean is not blown up
    by eps. A reward that is NaN was not given: it is in no mean and no standard deviation, and its advantage is 0.

    Args:
        rewards: " b", the rewards of whole groups one after another.
        group_size: completions per prompt, at least 2 where the group is looked at.
        scale: the sample standard deviation (ddof = 1; QaRL §2.1 says only std) that divides: of the group, of the
            batch, or none.
        eps: added to the standard deviation.
        baseline: what is subtracted: the mean of the `group`, that of its others (`leave_one_out`), or `none`.
        all_reduce: makes the batch's standard deviation global over ranks.

    Raises:
        ValueError: `group_size` below 2.
        ConfigError: an unknown `scale` or `baseline`.

    >>> import torch
    >>> group_advantages(torch.tensor([1.0, 0.0, 3.0, 3.0]), 2, scale="none")
    tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    if group_size < 2 and (baseline != "none" or scale == "group"):
        raise ValueError(
            f"A group of one has no baseline: its advantage is always 0. Expected: group_size >= 2. "
            f"Given: {group_size}. Draw several completions per prompt."
        )
    check_choice("scale", scale, get_args(Scale))
    check_choice("baseline", baseline, get_args(Baseline))
    groups = as_float(rewards).view(-1, group_size)
    given = ~groups.isnan()
    varied = differing(groups)[:, None]
    groups, members = torch.where(given, groups, 0.0), given.sum(dim=1, keepdim=True).to(groups.dtype)
    deviation = (groups - groups.sum(dim=1, keepdim=True) / members.clamp(min=1)) * given
    centred = groups if baseline == "none" else deviation * varied
    if baseline == "leave_one_out":
        centred = centred * (members / (members - 1).clamp(min=1))
    if scale == "group":
        centred = centred / ((deviation.square().sum(dim=1, keepdim=True) / (members - 1).clamp(min=1)).sqrt() + eps)
    elif scale == "batch":
        count = all_reduce(members.sum()).clamp(min=1)
        mean = all_reduce(groups.sum()) / count
        variance = all_reduce(((groups - mean) * given).square().sum()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return centred.flatten()


def whitened(
    advantages: Float[Tensor, " b"],
    lengths: Int[Tensor, " b"],
    eps: float = 1e-8,
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> Float[Tensor, " b"]:
    """Return advantages with mean 0 and variance 1 over the tokens of the batch: the normalisation of REINFORCE++.

    (A − mean(A)) / sqrt(var(A) + eps), each sequence counted once for each of its tokens, sample variance (Hu 2025;
    verl's `masked_whiten`). Advantages of sequences with tokens that are all equal give exactly 0.

    Args:
        advantages: " b".
        lengths: " b", tokens of each completion that count.
        eps: added to the variance.
        all_reduce: makes mean and variance global over ranks.

    >>> import torch
    >>> whitened(torch.tensor([1.0, 0.0]), torch.tensor([1, 3]))
    tensor([ 1.5000, -0.5000])
    """
    advantages = as_float(advantages)
    weights = lengths.to(advantages.dtype)
    count, total = all_reduce(torch.stack([weights.sum(), (weights * advantages).sum()])).unbind()
    centred = advantages - total / count.clamp(min=1)
    variance = all_reduce((weights * centred.square()).sum()) / (count - 1).clamp(min=1)
    counted = lengths > 0
    highest = all_reduce(torch.where(counted, advantages, -torch.inf).amax(), op="max")
    differ = highest > all_reduce(torch.where(counted, advantages, torch.inf).amin(), op="min")
    return centred * (variance + eps).rsqrt() * differ


def overlong_penalty(lengths: Int[Tensor, " b"], limit: int, cache: int, factor: float = 1.0) -> Float[Tensor, " b"]:
    """Return the soft over-long penalty to add to each reward, in [−factor, 0].

    0 up to `limit − cache` tokens, then linear down to −factor at `limit` (DAPO eq. 13).

    Args:
        lengths: " b", tokens of each completion.
        limit: the completion limit, in tokens.
        cache: tokens over which the penalty grows, in [1, limit].
        factor: the largest penalty, in units of reward.

    Raises:
        ValueError: `cache` outside [1, limit].

    >>> import torch
    >>> overlong_penalty(torch.tensor([6, 9, 10]), limit=10, cache=4)
    tensor([-0.0000, -0.7500, -1.0000])
    """
    if not 1 <= cache <= limit:
        raise ValueError(f"The penalty's range must fit. Expected: 1 <= cache <= {limit}. Given: {cache}. Correct it.")
    return -factor * ((lengths - (limit - cache)) / cache).clamp(0.0, 1.0)
