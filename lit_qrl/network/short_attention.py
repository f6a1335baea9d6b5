"""Attention of few queries on a CPU by products of whole matrices; torch's own takes two to five times as long."""

import torch
from torch import Tensor

from lit_qrl.network.invariant import one_by_one

QUERIES = 64
"""Of one sequence, up to which it is faster, backward pass among it."""


def is_short(query: Tensor) -> bool:
    """Return whether queries "b heads n d" are attended here; 16-bit scores would be rounded, which torch's are not."""
    few = query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[2] <= QUERIES
    return few and not one_by_one()


def attend_short(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float | None) -> Tensor:
    """Return softmax(Q Kᵀ · scale) V "b heads n dim".

    Args:
        query: "b heads n d".
        key: "b key_heads m d"; heads a multiple of key_heads, whose queries are rows of one matrix.
        value: "b key_heads m dim".
        seen: broadcastable to "b 1 n m": True where a query sees a key; None is all.
        scaling: factor of the scores; None is 1/√d.

    >>> one = torch.ones(1, 1, 2, 2)
    >>> attend_short(one, one, torch.tensor([[[[2.0], [4.0]]]]), torch.ones(2, 2).bool().tril()[None, None], None)
    tensor([[[[2.],
              [3.]]]])
    """
    groups, n = query.shape[1] // key.shape[1], query.shape[2]
    rows = query.unflatten(1, (-1, groups)).flatten(2, 3)
    scores = (rows @ key.transpose(2, 3)).mul_(query.shape[3] ** -0.5 if scaling is None else scaling)
    if seen is not None:
        scores.unflatten(2, (groups, n)).masked_fill_(~seen[:, :, None], -torch.inf)
    return (scores.softmax(-1) @ value).unflatten(2, (groups, n)).flatten(1, 2)
