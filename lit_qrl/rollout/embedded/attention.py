"""What a sampler computes otherwise: attention of one new token over a cache in which several query heads share each
key head, and norms of queries and keys that take one kernel.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.structure import RMS_NORMS
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm

FOLDED = "lit_qrl_folded"


def attend_folded(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    last_columns: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output "b 1 heads dim"; for more than one new token, the library's own attention.

    The query heads of a key head become rows of one query, so that the cache is read as it lies. The library repeats
    it for every query head instead, which copies all of it in each step. Where the last column of each row is given, a
    GPU reads the columns up to it alone.

    Args:
        module: the attention layer.
        query: "b heads 1 dim".
        key: "b key_heads n dim".
        value: "b key_heads n dim".
        attention_mask: "b 1 1 n", or None.
        dropout: for the library's attention.
        scaling: factor of the scores.
        last_columns: " b", of those that the mask shows, which begin with the first; None where it shows others.
        **kwargs: what else the library hands to an attention.
    """
    heads, new = query.shape[1:3]
    if new != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    query = query.to(key.dtype)  # under autocast turned queries are wider than what is cached
    if last_columns is not None and dispatch.available(query, "decoding"):
        from lit_qrl.rollout.embedded import attention_triton

        return attention_triton.attend(query[:, :, 0], key, value, last_columns, scaling)[:, None], None
    folded = query.view(len(query), key.shape[1], heads // key.shape[1], query.shape[3])
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(len(query), 1, heads, value.shape[3]), None


AttentionInterface.register(FOLDED, attend_folded)
AttentionMaskInterface.register(FOLDED, sdpa_mask)


def take_norms(network: nn.Module) -> int:
    """Let the norms that are left, those of queries and keys, take one kernel, and return how many; names stay.

    Args:
        network: of decoder layers as in Llama, Mistral, Qwen2 and Qwen3; other norms stay as they are.
    """
    count = 0
    for part in list(network.modules()):
        for child, inner in list(part.named_children()):
            if type(inner).__name__ in RMS_NORMS:
                setattr(part, child, OnePassRMSNorm(inner, columns=False, codes=""))
                count += 1
    return count
