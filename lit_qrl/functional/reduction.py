"""From the loss of every token to one scalar."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_qrl.errors import check_choice
from lit_qrl.functional._statistics import masked, row_means

Reduction = Literal["sequence", "token", "constant", "sequence_sum", "token_sum"]


def reduce(
    loss: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    reduction: Reduction,
    length: int | None = None,
    total: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Return the scalar loss.

    - `sequence`: mean over sequences of the mean over tokens (GRPO, AIS eq. 4); an empty or wholly rejected sequence
      stays in the count and adds 0.
    - `token`: sum over tokens / number of tokens (DAPO).
    - `constant`: sum over tokens / (sequences · length) (Dr.GRPO).
    - `sequence_sum`: mean over sequences of the sum over tokens (peers' "seq-mean-token-sum").
    - `token_sum`: sum over all tokens of the mini-batch, divided by nothing.

    With the `total` of a whole mini-batch, the results of its micro-batches add up to its loss.

    Args:
        loss: "b t".
        mask: tokens that count, after rejection.
        reduction: one of the above.
        length: the completion limit, in tokens; for `constant` only.
        total: 0-dim, of the whole mini-batch over all ranks: tokens for `token`, sequences otherwise; None counts
            those given here. 0 gives a loss of 0.

    Raises:
        ConfigError: an unknown reduction.
        ValueError: `constant` without a length.

    >>> loss, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    >>> [float(reduce(loss, mask, how, 2)) for how in ("sequence", "token", "constant", "sequence_sum", "token_sum")]
    [3.5, 3.0, 2.25, 4.5, 9.0]
    """
    check_choice("reduction", reduction, get_args(Reduction))
    if reduction == "sequence":
        value = row_means(mask, loss).sum()
    else:
        value = masked(mask, loss).sum()
    if reduction == "token_sum":
        return value
    if total is None:
        total = count(mask, reduction, loss.dtype)
    total = total.clamp(min=1)
    if reduction == "constant":
        if length is None or length < 1:
            raise ValueError(
                f"The reduction 'constant' divides by the completion limit. Expected: length >= 1. Given: {length}. "
                "Pass length."
            )
        total = total * length
    return value / total


def count(mask: Bool[Tensor, "b t"], reduction: Reduction, dtype: torch.dtype = torch.float32) -> Float[Tensor, ""]:
    """Return the `total` that `reduce` divides by: the tokens for `token`, the sequences otherwise.

    >>> count(torch.tensor([[True, False], [False, False]]), "token")
    tensor(1.)
    """
    if reduction == "token":
        return mask.sum().to(dtype)
    return torch.full((), mask.shape[0], dtype=dtype, device=mask.device)
