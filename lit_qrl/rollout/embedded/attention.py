"""Attention of one new token over a cache in which several query heads share each key head."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_qrl.formats.kernels import dispatch

FOLDED = "lit_qrl_folded"
_LAST = "_lit_qrl_last"


def mask_of(last: Tensor, columns: int) -> Tensor:
    """Return the mask "b 1 1 n" of rows that see their columns up to the one given for each, which it remembers.

    >>> mask_of(torch.tensor([1]), 3)[0, 0, 0].tolist()
    [True, True, False]
    """
    mask = (torch.arange(columns, device=last.device) <= last[:, None])[:, None, None, :]
    setattr(mask, _LAST, last)
    return mask


def attend_folded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output "b 1 heads dim"; for more than one new token, the library's own attention.

    The query heads of a key head become rows of one query, so that the cache is read as it lies. The library repeats
    it for every query head instead, which copies all of it in each step. Where the mask is of `mask_of`, a GPU reads
    those columns alone.

    Args:
        module: the attention layer.
        query: "b heads 1 dim".
        key: "b key_heads n dim".
        value: "b key_heads n dim".
        attention_mask: "b 1 1 n", or None.
        dropout: for the library's attention.
        scaling: factor of the scores.
        **kwargs: what else the library hands to an attention.
    """
    heads, new = query.shape[1:3]
    if new != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    query = query.to(key.dtype)  # under autocast turned queries are wider than what is cached
    last = getattr(attention_mask, _LAST, None)
    if last is not None and dispatch.available(query):
        from lit_qrl.rollout.embedded import attention_triton

        return attention_triton.attend(query[:, :, 0], key, value, last, scaling)[:, None], None
    folded = query.view(len(query), key.shape[1], heads // key.shape[1], query.shape[3])
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(len(query), 1, heads, value.shape[3]), None


AttentionInterface.register(FOLDED, attend_folded)
AttentionMaskInterface.register(FOLDED, sdpa_mask)
