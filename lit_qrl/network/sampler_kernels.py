"""A decoder's forward pass by the kernels of the engine that samples from it, so that both give the same bits.

Products with weights and attention are taken where torch is asked for them (`network.invariant`). What a model writes
as several operations and an engine computes in one, its norms, the rotation of queries and keys and the gated
activation, is a module of its own here: its class is one of this file's, over the model's own, whose forward pass calls
the engine's kernel. Backward passes are those of the usual operations at the same inputs.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_qrl.errors import ConfigError
from lit_qrl.network.names import become
from lit_qrl.network.padding_free import padded_attention
from lit_qrl.network.structure import CACHE_ARGUMENTS, body

KNOWN = ("llama", "qwen2", "qwen3")
"""Model types whose operations are those of this file, in this order: of `batch_invariant`, and of `same_kernels`."""


class SamplerKernels(Protocol):
    """What an engine computes a dense decoder with; no row of a result depends on the rows beside it."""

    name: str
    """Whose they are, for errors."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight.T + bias`, "m in" -> "m out"."""
        ...

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return causal attention "b n heads d" over whole sequences, with gradients; keys may have fewer heads."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / √(mean x² + eps) · weight over the last dimension."""
        ...

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys "m heads d" rotated by their positions " m"."""
        ...

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up."""
        ...

    def logprobs(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probs " m" of tokens under fp32 scores "m v"."""
        ...


class _Exact(torch.autograd.Function):
    """A kernel forward; backward the gradients of the usual operations at the same inputs."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], usual: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.usual = usual
        with torch._C.DisableTorchFunction():
            return kernel(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        inputs = [one.detach().requires_grad_(one.is_floating_point()) for one in ctx.saved_tensors]
        wanted = [one for one, needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if needed]
        with torch.enable_grad():
            out = ctx.usual(*inputs)
        found = iter(torch.autograd.grad(out, wanted, grads if isinstance(out, tuple) else grads[0]))
        return None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[2:])


def exact(kernel: Callable[..., Any], usual: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return `kernel(*inputs)` with the gradients of `usual(*inputs)`.

    >>> x = torch.tensor([2.0], requires_grad=True)
    >>> out = exact(torch.square, lambda x: 3 * x, x)
    >>> out.backward()
    >>> out.item(), x.grad.item()
    (4.0, 3.0)
    """
    return _Exact.apply(kernel, usual, *inputs)


class _Linear(torch.autograd.Function):
    """A product with a weight by a kernel for rows; backward the usual products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Callable[[Tensor, Tensor, Any], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        with torch._C.DisableTorchFunction():
            out = kernel(x.reshape(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        return (
            (grad @ weight).view(x.shape) if wants_x else None,
            grad.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None,
            grad.sum(dim=0) if ctx.biased and wants_bias else None,
            None,
        )


def linear_by(kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `kernel(rows, weight, bias)` of the rows of `x`, "... in" -> "... out", with the usual gradients."""
    return _Linear.apply(x, weight, bias, kernel)  # pyright: ignore[reportReturnType]


def functions_of(sampler: SamplerKernels) -> Mapping[Any, Callable[..., Tensor]]:
    """Return what takes the place of torch's functions where an engine's own kernels are called."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_by(sampler.linear, input, weight, bias)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p or attn_mask is not None or not (is_causal or query.shape[2] == key.shape[2] == 1):
            raise unknown("attention that is masked or has dropout")
        factor = query.shape[-1] ** -0.5 if scale is None else scale

        with torch._C.DisableTorchFunction():
            q, k, v = (one.transpose(1, 2) for one in (query, key, value))
            return sampler.attention(q, k, v, factor).transpose(1, 2)

    return {F.linear: linear, F.scaled_dot_product_attention: attention}


def unknown(what: str) -> ConfigError:
    """Return the error for an operation that is not batch-invariant here."""
    return ConfigError(
        f"This model computes {what}, of which there is no batch-invariant kernel here.",
        expected="linear layers and scaled dot-product attention",
        remedy="Set data.engine.batch_invariant to false, or model.policy.attn_implementation to sdpa.",
    )


class ExactModule(nn.Module):
    """Over a class of the model's own: the same parameters, the engine's kernels."""

    sampler_kernels: SamplerKernels
    """Not copied with the module."""


class ExactNorm(ExactModule):
    """A norm over the last dimension."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the norm "... h"."""
        eps: Any = self.variance_epsilon
        kernels, weight = self.sampler_kernels, self.weight
        assert isinstance(weight, Tensor)
        return exact(lambda x, w: kernels.norm(x, w, eps), lambda x, w: usual_norm(x, w, eps), hidden_states, weight)


class ExactMLP(ExactModule):
    """A gated MLP."""

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) · up(x)), "... h"."""
        module: Any = self
        gated = exact(self.sampler_kernels.gate, _usual_gate, module.gate_proj(x), module.up_proj(x))
        return module.down_proj(gated)


class ExactAttention(ExactModule):
    """Attention with rotated queries and keys."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention's output "b n h", and None; the arguments are the library's."""
        module: Any = self
        shape = hidden_states.shape[:-1]
        query, key, value = (
            project(hidden_states).view(*shape, -1, module.head_dim)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        cos, sin = position_embeddings
        if position_ids is None:
            position_ids = torch.arange(shape[1], device=hidden_states.device)[None]
        positions = position_ids.expand(shape)
        kernels = self.sampler_kernels

        def rotated(q: Tensor, k: Tensor, at: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
            flat = kernels.rotate(q.flatten(0, 1), k.flatten(0, 1), at.flatten())
            return tuple(one.view(like.shape) for one, like in zip(flat, (q, k), strict=True))

        query, key = exact(rotated, _usual_rotation, query, key, positions, cos, sin)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, sdpa_attention_forward)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        for cache in [kwargs.pop(name, None) for name in CACHE_ARGUMENTS]:
            if cache is not None:
                key, value = cache.update(key, value, module.layer_idx)
        out, _ = attend(module, query, key, value, attention_mask, dropout=0.0, scaling=module.scaling, **kwargs)
        return module.o_proj(out.reshape(*shape, -1)), None


def usual_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / √(mean x² + eps) · weight, computed in fp32."""
    raised = x.float()
    return (raised * torch.rsqrt(raised.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _usual_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _usual_rotation(query: Tensor, key: Tensor, _: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[..., None, :] + torch.cat((-second, first), dim=-1) * sin[..., None, :]

    return turned(query), turned(key)


def check_decoder(config: Any, engine: str) -> None:
    """Raise `ConfigError` for a model that has operations besides those of this file.

    Args:
        config: the model's.
        engine: whose kernels they would be.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ("full_attention",))
    scaled = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    for unknown, what in (
        (text.model_type not in KNOWN, f"model_type {text.model_type}"),
        (kinds != {"full_attention"}, f"layers of {', '.join(sorted(kinds))}"),
        (getattr(text, "hidden_act", "silu") != "silu", f"hidden_act {getattr(text, 'hidden_act', None)}"),
        (scaled != "default", f"rope_type {scaled}"),
        (bool(getattr(text, "mlp_bias", False)), "mlp_bias"),
    ):
        if unknown:
            raise ConfigError(
                f"The learner cannot compute this model with the kernels of {engine}.",
                expected=f"a dense decoder ({', '.join(KNOWN)}) with full attention, plain rotary positions and silu",
                given=what,
                remedy="Set data.engine.batch_invariant to false, or use TransformersEngine.",
            )


def adopt(network: Any, kernels: SamplerKernels) -> None:
    """Let norms, attention and gated activations of a causal language model compute with an engine's kernels.

    Args:
        network: of a kind that `check_decoder` lets pass.
        kernels: the engine's.

    Raises:
        ConfigError: for another attention than torch's, whose place the kernel takes.
    """
    attention = network.config.get_text_config()._attn_implementation
    if padded_attention(attention) != "sdpa":
        raise ConfigError(
            f"The learner cannot compute its attention with the kernel of {kernels.name}.",
            expected="model.policy.attn_implementation: sdpa",
            given=attention,
            remedy="Leave it out, or set data.engine.batch_invariant to false.",
        )
    model = body(network)
    for layer in model.layers:
        attention = layer.self_attn
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _become(norm, ExactNorm, kernels)
        for name in ("q_norm", "k_norm"):
            if hasattr(attention, name):
                _become(getattr(attention, name), ExactNorm, kernels)
        _become(attention, ExactAttention, kernels)
        _become(layer.mlp, ExactMLP, kernels)
    _become(model.norm, ExactNorm, kernels)
    network.sampler_kernels = kernels


def kernels_adopted(network: Any) -> SamplerKernels | None:
    """Return the kernels that a model computes with, or None where they are its own."""
    return getattr(network, "sampler_kernels", None)


def _become(module: nn.Module, kind: type[ExactModule], kernels: SamplerKernels) -> None:
    become(module, kind)
    held: Any = module
    held.sampler_kernels = kernels
