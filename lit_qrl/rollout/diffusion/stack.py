"""The decoder layers of a Llama one after the other, for denoising: few kernels, and no work that nobody reads.

A cache keeps keys and values of a whole canvas, of which a forward renews the columns that it is given.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, apply_rotary_pos_emb

from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.structure import body
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm
from lit_qrl.rollout.embedded.attention import FOLDED
from lit_qrl.rollout.embedded.cache import SlotCache, SlotLayer


class CanvasLayer(SlotLayer):
    """Keys and values of one layer, whose columns are seen by every forward; the cache holds those of the next one."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take over the keys and values of the whole canvas, which the first forward brings."""
        # of their own, since they may be parts of one product together with the queries
        self.keys, self.values, self.is_initialized = key_states.contiguous(), value_states.contiguous(), True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Renew the columns `cache.at` and return those of the whole canvas, always in the same memory."""
        key_states, value_states = autocast_input(key_states), autocast_input(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.cache.at is None:
            self.keys.copy_(key_states)
            self.values.copy_(value_states)
        else:
            self.keys.index_copy_(2, self.cache.at, key_states)
            self.values.index_copy_(2, self.cache.at, value_states)
        return self.keys, self.values


class CanvasCache(SlotCache):
    """Keys and values of all layers, in the form that Hugging Face models take.

    The first forward must be of the whole canvas; before a later one the caller sets `at`, the columns " n" that it
    is given, or None for all of them. Positions are given, so that no column counts as filled.

    Args:
        layers: number of layers.
        columns: of the canvas.
    """

    kind = CanvasLayer

    def __init__(self, layers: int, columns: int) -> None:
        super().__init__(layers, 0, columns)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines "b n d" of rotary embeddings."""


class Stack:
    """The layers of a bidirectional Llama, whose modules it calls without the library's forward between them.

    That forward asks the device whether sequences are packed, and takes another kernel for attention while a CUDA graph
    is recorded. Of the last layer queries, output and MLP are computed for the columns alone whose states are read:
    those of the others go nowhere.

    Args:
        network: the model; `of` says whether it is one.
    """

    def __init__(self, network: Any) -> None:
        self.inner: Any = body(network)
        self.layers = list(self.inner.layers)

    @classmethod
    def of(cls, network: Any) -> "Stack | None":
        """Return the layers of a network, or None for one that is no Llama with scaled dot-product attention."""
        inner: Any = body(network)
        plain = type(inner) is LlamaModel and network.config._attn_implementation in ("sdpa", FOLDED)
        known = plain and all(type(layer.self_attn) is LlamaAttention for layer in inner.layers)
        return cls(network) if known else None

    def angles(self, positions: Tensor) -> Angles:
        """Return the rotary embeddings of positions "b n"."""
        cos, sin = self.inner.rotary_emb(self.inner.embed_tokens.weight, position_ids=positions)
        return cos.contiguous(), sin.contiguous()

    def states(
        self,
        tokens: Tensor,
        angles: Angles,
        valid: Tensor | None,
        part: Tensor | None = None,
        cache: CanvasCache | None = None,
    ) -> Tensor:
        """Return the last hidden states "b p h" of some of the columns that are computed.

        Args:
            tokens: "b n", of the columns that are computed.
            angles: of their positions.
            valid: "b s", which columns of the canvas hold a token; None where all do.
            part: " p", which of the n columns are read; None for all of them.
            cache: keys and values of the canvas; without it the n columns are all there are.
        """
        mask = None if valid is None else valid[:, None, None, :]
        residual, delta = self.inner.embed_tokens(tokens), None
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            size = (*tokens.shape, -1, attention.head_dim)
            x, residual = _normed(layer.input_layernorm, delta, residual)
            if part is not None and index == len(self.layers) - 1:
                key, value = attention.k_proj(x), attention.v_proj(x)
                x, residual = x.index_select(1, part), residual.index_select(1, part)
                query = attention.q_proj(x)
                turned = angles[0].index_select(1, part), angles[1].index_select(1, part)
            else:
                query, key, value = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
                turned = angles
            query = _turned(query.view(*x.shape[:2], *size[2:]), turned)
            key, value = _turned(key.view(size), angles), value.view(size).transpose(1, 2)
            if cache is not None:
                key, value = cache.update(key, value, index)
            groups = attention.num_key_value_groups
            if groups > 1:
                key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=attention.scaling)
            delta = attention.o_proj(seen.transpose(1, 2).reshape(*x.shape[:2], -1))
            x, residual = _normed(layer.post_attention_layernorm, delta, residual)
            delta = layer.mlp(x)
        return _normed(self.inner.norm, delta, residual)[0]


def _normed(norm: Any, delta: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum."""
    if isinstance(norm, OnePassRMSNorm):
        return norm(residual, both=True) if delta is None else norm(delta, residual, both=True)
    residual = residual if delta is None else residual + delta
    return norm(residual), residual


def _turned(x: Tensor, angles: Angles) -> Tensor:
    """Return queries or keys "b n heads d" under their angles, "b heads n d"; those given may be written over."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    if half and dispatch.available(x, "denoising") and angles[0].shape[-1] == x.shape[-1]:
        from lit_qrl.formats.kernels import rotary_triton

        if x.stride(3) != 1 or x.stride(0) != len(x[0]) * x.stride(1):
            x = x.contiguous()
        cos, sin = (angle.flatten(0, 1) for angle in angles)
        rotary_triton.rotate(x.flatten(0, 1), cos, sin, in_place=True)
        return x.transpose(1, 2)
    x = x.transpose(1, 2)
    return apply_rotary_pos_emb(x, x, *angles)[0]
