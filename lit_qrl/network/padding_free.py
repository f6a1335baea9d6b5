"""Forward passes without padding, where the completions of one prompt share its computation.

Every layer but attention works on tokens alone, so it gets the real tokens only, in one flat row: each group's prompt
once, then the completions. Attention puts the sequences together again, in buckets of similar length.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_qrl.network.structure import PLAIN_ATTENTION, body
from lit_qrl.types import RolloutBatch

ATTENTION = "lit_qrl_padding_free"
BUCKET_GROWTH = 1.2
"""Longest over shortest sequence of a bucket: attention then pads at most a fifth of a row."""
BUCKET_TOKENS = 1024
"""Padded tokens below which a bucket takes longer sequences too: a call costs more than the padding it saves."""


@dataclass(slots=True)
class FlatBatch:
    """A batch as one flat row of real tokens.

    Args:
        tokens: " n", ids: the prompts of all groups, then of each row what it does not share: the rest of its prompt,
            and the completion without its last token.
        positions: " n", position of each token in its sequence.
        buckets: "rows length" each: where in the flat row a sequence's tokens are; 0 beyond its end.
        index: " m", all buckets flattened.
        restored: " n", where each token's output is among the flattened buckets.
        copies: "p rows", where each of the prompts' tokens, which come first, is among the flattened buckets; −1 where
            fewer rows share it.
        predictors: " m", where in the flat row each scored token is predicted.
        scored: positions "m" of the scored tokens in the mask: rows, steps.
        place: "b s", where in the flat row each token of the batch is; −1 for padding and last tokens.
        attention: causal attention of "b n heads dim" with a factor of the scores; None is torch's.
    """

    tokens: Tensor
    positions: Tensor
    buckets: list[Tensor]
    index: Tensor
    restored: Tensor
    copies: Tensor
    predictors: Tensor
    scored: tuple[Tensor, Tensor]
    place: Tensor
    attention: Callable[[Tensor, Tensor, Tensor, float | None], Tensor] | None = None

    def to(self, device: torch.device) -> "FlatBatch":
        """Return the layout on a device."""
        held = {name: getattr(self, name) for name in self.__slots__}
        return FlatBatch(**tree_map_only(Tensor, lambda one: one.to(device), held))

    def laid_out(self, values: Tensor) -> Tensor:
        """Return "n …" of values "b s …" that are equal where rows share a prompt."""
        there = self.place.flatten() >= 0
        source = torch.empty(len(self.tokens), dtype=torch.long, device=self.place.device)
        source[self.place.flatten()[there]] = there.nonzero()[:, 0]
        return values.flatten(0, 1).index_select(0, source)

    def put_back(self, values: Tensor, absent: int) -> Tensor:
        """Return "b s …" of values "n …", with `absent` where the flat row holds no token."""
        index = self.place.clamp(min=0)
        held = (self.place >= 0).view(*self.place.shape, *(1,) * (values.ndim - 1))
        return torch.where(held, values[index], absent)


def enable_padding_free(network: Any, dropout: bool = False) -> bool:
    """Give a Hugging Face model `attend` as its attention where it computes the same, and return whether it did.

    Without a layout the model computes as before.

    Args:
        network: a causal language model with scaled dot-product attention.
        dropout: the model is trained with what dropout its config asks for, which `attend` does not do.
    """
    config = network.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ("full_attention",)
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    plain = config.model_type in PLAIN_ATTENTION and set(kinds) == {"full_attention"} and not windowed
    if not plain or config._attn_implementation != "sdpa" or (dropout and getattr(config, "attention_dropout", 0)):
        return False
    network.set_attn_implementation(ATTENTION)
    return True


def is_padding_free(network: Any) -> bool:
    """Return whether `flat_hidden` may be called with a model."""
    return network.config.get_text_config()._attn_implementation == ATTENTION


def laid_out(network: Any, batch: RolloutBatch) -> RolloutBatch:
    """Return a batch with the layout that a model's forward pass would make of it, so that the pass waits for nothing.

    To make it the host must see tokens and mask: it then waits for whatever the device was given before.

    Args:
        network: a causal language model; the batch is returned as it is where it computes padded ones.
        batch: the sequences.
    """
    if not is_padding_free(network) or batch.layout is not None:
        return batch
    return replace(batch, layout=flatten(batch).to(batch.tokens.device))


def flatten(batch: RolloutBatch) -> FlatBatch:
    """Return the layout of a batch on the CPU; completions count up to their last unmasked token.

    Args:
        batch: the sequences; rows of one group whose prompts are equal share it, as far as it took the same experts.
    """
    # by NumPy: some eighty operations on arrays of a few thousand numbers, which threads only delay
    words, mask, prompt, group = _on_host(batch)
    b, t = mask.shape
    width = words.shape[1] - t
    completion = (mask * np.arange(1, t + 1)).max(axis=1)
    inputs = np.maximum(completion - 1, 0)  # the last token is predicted, but predicts nothing
    first, owner, shared = _owners(words[:, :width], prompt, group, batch.routed_experts)
    prompt_start = np.zeros(b, dtype=np.int64)
    prompt_start[first] = prompt[first].cumsum() - prompt[first]
    length = prompt + inputs
    own = length - shared
    own_start = prompt[first].sum() + own.cumsum() - own

    columns = np.arange(int(length.max()))
    flat = np.where(
        columns < shared[:, None],
        prompt_start[owner][:, None] + columns,
        (own_start - shared)[:, None] + columns,
    )
    used = columns < length[:, None]
    n = int(prompt[first].sum() + own.sum())
    where = flat[used]
    tokens, positions, restored = (np.empty(n, dtype=np.int64) for _ in range(3))
    source = np.minimum(columns + (width - prompt)[:, None], words.shape[1] - 1)
    tokens[where] = np.take_along_axis(words, source, axis=1)[used]
    positions[where] = np.broadcast_to(columns, flat.shape)[used]
    flat[~used] = 0

    buckets, inner, start = [], [], 0
    for rows in _bucket_rows(length):
        longest = int(length[rows].max())
        bucket, inside = flat[rows, :longest], used[rows, :longest]
        # Rows that share a prompt write the same outputs; any of them serves.
        restored[bucket[inside]] = start + inside.ravel().nonzero()[0]
        start += bucket.size
        buckets.append(bucket)
        inner.append(np.where(inside, bucket, n))
    copies = _copies(np.concatenate([bucket.ravel() for bucket in inner]), int(prompt[first].sum()))
    rows, steps = mask.nonzero()
    predictors = flat[rows, prompt[rows] - 1 + steps]
    place = np.full(words.shape, -1)
    place[used.nonzero()[0], source[used]] = where
    made = {"tokens": tokens, "positions": positions, "restored": restored, "copies": copies, "predictors": predictors}
    made |= {"index": np.concatenate([bucket.ravel() for bucket in buckets]), "place": place}
    return FlatBatch(
        **tree_map_only(np.ndarray, torch.from_numpy, {**made, "buckets": buckets, "scored": (rows, steps)})
    )


def prompt_tokens_shared(batch: RolloutBatch) -> tuple[int, int]:
    """Return how many tokens of prompts need not be computed again, and how many could be saved at most.

    Args:
        batch: the sequences.
    """
    words, mask, prompt, group = _on_host(batch)
    rows = np.arange(len(group))
    _, owner, shared = _owners(words[:, : words.shape[1] - mask.shape[1]], prompt, group, batch.routed_experts)
    again = np.ones(len(group), dtype=bool)
    again[np.unique(group, return_index=True)[1]] = False
    return int(shared[owner != rows].sum()), int(prompt[again].sum())


def _on_host(batch: RolloutBatch) -> list[Any]:
    return [part.cpu().numpy() for part in (batch.tokens, batch.mask, batch.prompt_length, batch.group)]


Indices = npt.NDArray[np.int64]


def _copies(flat: Indices, prompts: int) -> Indices:
    """Return "p rows", at which of the places `flat` (" m") each of the first p tokens is, else −1."""
    found = (flat < prompts).nonzero()[0]
    token = flat[found]
    order = token.argsort(kind="stable")
    token = token[order]
    counts = np.bincount(token, minlength=prompts)
    rank = np.arange(len(token)) - (counts.cumsum() - counts)[token]
    copies = np.full((prompts, int(counts.max()) if prompts else 0), -1)
    copies[token, rank] = found[order]
    return copies


def _owners(prompts: Any, length: Any, group: Any, routes: Tensor | None) -> tuple[Indices, Indices, Indices]:
    """Return the rows that own a prompt, for every row the row whose prompt it uses, and how many tokens of it."""
    _, earliest, inverse = np.unique(group, return_index=True, return_inverse=True)
    rows, owner = np.arange(len(group)), earliest[inverse]
    equal = (prompts == prompts[owner]).all(axis=1) & (length == length[owner])
    shared = np.where(equal, length, 0)
    if routes is not None:  # a prompt that was computed twice may have gone two ways, from some token on
        width = prompts.shape[1]
        theirs = routes[torch.from_numpy(owner).to(routes.device), :width]
        same = (routes[:, :width] == theirs).flatten(2).all(dim=2).cpu().numpy()
        ways = np.where(same.all(axis=1), width, same.argmin(axis=1))  # the first token that went another way
        shared = np.minimum(shared, np.maximum(ways - (width - length), 0))
    owner = np.where(shared > 0, owner, rows)
    shared = np.where(owner == rows, length, shared)
    return (owner == rows).nonzero()[0], owner, shared


def _bucket_rows(length: Any) -> list[Indices]:
    """Return the rows of each bucket, longest first."""
    order = (-length).argsort(kind="stable")
    lengths = length[order].tolist()
    cuts = [0]
    for row, tokens in enumerate(lengths):
        longest = lengths[cuts[-1]]
        if longest > BUCKET_GROWTH * tokens and longest * (row - cuts[-1]) >= BUCKET_TOKENS:
            cuts.append(row)
    return [order[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]


def spread(values: Tensor, mask: Tensor, scored: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return values "b t", 0 where nothing is scored.

    Args:
        values: "b t", or of the scored positions alone.
        mask: "b t".
        scored: rows and columns of the scored positions; None where all are.
    """
    if scored is None:
        return torch.where(mask, values, 0.0)
    return values.new_zeros(mask.shape).index_put(scored, values)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    flat_batch: FlatBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output "1 n heads dim" of a flat row; without a layout, the library's own attention.

    Args:
        module: the attention layer.
        query: "1 heads n dim".
        key: "1 key_heads n dim".
        value: "1 key_heads n dim".
        attention_mask: not used: the layout says what is attended to.
        scaling: factor of the scores.
        dropout: for the library's attention; such models have none.
        flat_batch: the layout, or None.
        **kwargs: what else the library hands to an attention.
    """
    if flat_batch is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    places = flat_batch.index, flat_batch.restored, flat_batch.copies
    # squeezed, not indexed: the gradient of an index is a tensor of zeros and a copy
    laid_out: Any = tuple(_LayOut.apply(x.squeeze(0).transpose(0, 1), *places) for x in (query, key, value))
    return attend_laid_out(laid_out, flat_batch, scaling)[None], None


def attend_laid_out(rows: tuple[Tensor, Tensor, Tensor], flat_batch: FlatBatch, scaling: float | None) -> Tensor:
    """Return the attention output "n heads dim" of queries, keys and values that are laid out.

    Args:
        rows: "m heads dim" each; keys and values may have fewer heads.
        flat_batch: the layout.
        scaling: factor of the scores.
    """
    grouped = rows[0].shape[1] != rows[1].shape[1]
    sizes = [bucket.numel() for bucket in flat_batch.buckets]
    # one bucket is not split: the gradient of that is a copy
    parts = zip(*(x.split(sizes) if len(sizes) > 1 else (x,) for x in rows), strict=True)
    outputs = []
    for bucket, part in zip(flat_batch.buckets, parts, strict=True):
        if flat_batch.attention is not None:
            q, k, v = (x.unflatten(0, bucket.shape) for x in part)
            outputs.append(flat_batch.attention(q, k, v, scaling).flatten(0, 1))
            continue
        q, k, v = (x.unflatten(0, bucket.shape).transpose(1, 2) for x in part)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    restored: Any = _PutBack.apply(joined, flat_batch.restored)
    return restored


class _LayOut(torch.autograd.Function):
    """Rows of a flat tensor as buckets have them; the gradients of a prompt's copies are summed in fp32, in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, restored: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(restored, copies)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        restored, copies = ctx.saved_tensors
        grad = grads[0].index_select(0, restored)
        if copies.shape[1] > 1:
            wide = torch.promote_types(grad.dtype, torch.float32)
            shared = grads[0].index_select(0, copies.clamp(min=0).flatten()).unflatten(0, copies.shape).to(wide)
            grad[: len(copies)] = shared.masked_fill_((copies < 0)[..., None, None], 0.0).sum(1).to(grad.dtype)
        return grad, None, None, None


class _PutBack(torch.autograd.Function):
    """The flat rows of what buckets hold; each is taken from one place, so that its gradient is written, not added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, restored: Tensor) -> Tensor:
        ctx.save_for_backward(restored)
        ctx.rows = len(x)
        return x.index_select(0, restored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (restored,) = ctx.saved_tensors
        grad = grads[0].new_zeros(ctx.rows, *grads[0].shape[1:])
        return grad.index_copy_(0, restored, grads[0]), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def flat_hidden(network: Any, flat_batch: FlatBatch) -> Tensor:
    """Return the last hidden states "m h" that predict the scored tokens.

    Args:
        network: a causal language model for which `is_padding_free` holds.
        flat_batch: the layout.
    """
    # Four dimensions keep the library from making a mask of n × n; `attend` looks at the layout alone.
    no_mask = flat_batch.tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool)
    hidden = body(network)(
        input_ids=flat_batch.tokens[None],
        attention_mask=no_mask,
        position_ids=flat_batch.positions[None],
        use_cache=False,
        flat_batch=flat_batch,
    ).last_hidden_state
    return hidden[0].index_select(0, flat_batch.predictors)
