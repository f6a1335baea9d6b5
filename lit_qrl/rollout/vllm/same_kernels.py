"""Decoder layers whose sampler computes as the learner does, to the last bit and at full speed.

Learner and sampler differ in the last bits where they add in another order. A format that quantizes activations makes
steps of such bits: a code flips, and flips feed each other through the layers. Here each operation of a layer is the
same on both sides, and none depends on what else is in the batch:

| operation | kernel of both |
|---|---|
| norm, with the residual sum before it | the learner's (`formats/kernels/norm_triton.py`), one row a program |
| quantized inputs and their products | vLLM's (`precision/vllm_kernels/kernels.py`) |
| rotation, gated activation | each its own: elementwise, in fp32, rounded once |
| attention | FlashAttention of vLLM, all keys of a sequence in one piece |

What depends on the number of rows is taken out of vLLM by a patch (`rows_alone` of `patches.py`): at most 64 queries of
a head of keys, and at most 64 rows of an FP8 product, are computed as more would be. Rotary frequencies come from the
CPU, as transformers has them. Embedding and output head are each side's own, and of the head's last bits nothing makes
steps.

`batch_invariant` adds what is left, so that every ratio is 1: products with plain weights, the head's too, are made by
one Triton GEMM on both sides, and log-probs in the learner by the kernel of vLLM's sampler.
Weights of a format that leaves activations alone are plain ones then: they go out multiplied out, as the learner has
them. Both products of an adapter beside its base are that GEMM's, too; under one that goes out merged the learner
multiplies by the same rounded sum.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats import support
from lit_qrl.rollout.vllm.installation import installed_version

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat
    from lit_qrl.rollout.engine import SamplerSpec

log = logging.getLogger(__name__)

HEAD_DIMENSIONS = (64, 96, 128, 256)
"""For which FlashAttention 3 was seen to give a token the same bits in a whole sequence and alone."""
COMPARED = (0, 26)
"""The version of vLLM that was looked at so."""
KNOWN = ("llama", "qwen2", "qwen3")
"""Model types whose operations are those of the table."""
ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "attention_backend": ("FLASH_ATTN",),
    "compilation_config": ({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},),
    "quantization": (),
    "hf_overrides": (),
}
"""Arguments of `vllm.LLM` that choose other kernels, and the values that do not."""
_active = _exact = False
APART = "vLLM is in a process of its own"
IN_PARTS = "each process of tensor_parallel_size quantizes and adds its own part of a row"
REMEDY_EXACT = "Set data.engine.batch_invariant to false, or use TransformersEngine."


def active() -> bool:
    """Return whether the engine of this process computes as the learner does."""
    return _active


def exact() -> bool:
    """Return whether it multiplies plain weights as the learner does, too."""
    return _exact


def helps(spec: "SamplerSpec") -> bool:
    """Return whether the learner computes in the sampler's format, and that quantizes activations."""
    return spec.aligned and spec.format is not None and spec.format.quantizes_activations


def check(arguments: Mapping[str, Any], here: bool = True) -> None:
    """Raise `ConfigError` where this host has not the kernels, or a setting chooses others.

    Args:
        arguments: of `vllm.LLM`.
        here: look at this host.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if here and capability != (9, 0):
        raise ConfigError(
            "This host's GPU has not the kernels by which learner and sampler compute alike.",
            expected="compute capability 9.0",
            given=capability or "no GPU",
            remedy="Set data.engine.same_kernels and batch_invariant to false.",
        )
    for name, values in ARGUMENTS.items():
        if arguments.get(name) is not None and arguments[name] not in values:
            raise ConfigError(
                "An argument of data.engine.engine_args chooses other kernels than the learner's.",
                expected=f"{name} left out",
                given=f"{name}: {arguments[name]}",
                remedy="Leave it out, or set data.engine.same_kernels and batch_invariant to false.",
            )


def check_exact(format: "NumberFormat | None", arguments: Mapping[str, Any], rank: int = 0, room: int = 0) -> None:
    """Raise `ConfigError` where `batch_invariant` cannot be had.

    Args:
        format: of the sampler's layers; None where they are plain.
        arguments: of `vllm.LLM`.
        rank: of the adapter that is published apart from its base; 0 for none.
        room: `max_lora_rank`, the rank of the factors in the engine, which fills them up with zeros.
    """
    check(arguments)
    found = installed_version()
    version = found[0] if found is not None else (0, 0, 0)
    if version[:2] != COMPARED:
        raise ConfigError(
            "The kernels of learner and sampler were not seen to be equal in the installed vLLM.",
            expected="vLLM {}.{}".format(*COMPARED),
            given=".".join(map(str, version)),
            remedy=REMEDY_EXACT,
        )
    if format is not None and support.row_of(format).vllm_varies:
        known = support.names_where(lambda row: "cuda" in row.vllm and not row.vllm_varies)
        raise ConfigError(
            f"vLLM's kernel for {format.name} on a GPU was not seen to add in one order whatever the batch is.",
            expected=f"publisher.format: {', '.join(known)}",
            given=format.name,
            remedy="Choose one of them, or set data.engine.batch_invariant to false.",
        )
    if rank != room:
        from lit_qrl.rollout.vllm.checks import LORA_RANKS  # which brings transformers

        raise ConfigError(
            "The engine would multiply an adapter of another rank than the learner's, which was not seen to be equal.",
            expected=f"data.engine.max_lora_rank: {rank}, one of 0, {', '.join(map(str, LORA_RANKS))}",
            given=room,
            remedy="Leave it out, and give model.policy.lora one of these ranks; or set publisher.lora to merged.",
        )


def check_decoder(network: Any) -> None:
    """Raise `ConfigError` for a model that computes otherwise in vLLM than by the operations of the table."""
    text = network.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ("full_attention",))
    scaled = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    dimensions = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for unknown, what in (
        (text.model_type not in KNOWN, f"model_type {text.model_type}"),
        (kinds != {"full_attention"}, f"layers of {', '.join(sorted(kinds))}"),
        (getattr(text, "hidden_act", "silu") != "silu", f"hidden_act {getattr(text, 'hidden_act', None)}"),
        (scaled != "default", f"rope_type {scaled}"),
        (bool(getattr(text, "mlp_bias", False)), "mlp_bias"),
        (dimensions not in HEAD_DIMENSIONS, f"heads of {dimensions} dimensions"),
        (text.model_type == "qwen3" and dimensions % 128 != 0, f"norms over {dimensions} dimensions"),
    ):
        if unknown:
            raise ConfigError(
                "This model was not seen to compute alike in vLLM and in the learner.",
                expected=f"a dense decoder ({', '.join(KNOWN)}) with full attention, plain rotary positions, silu, and "
                f"heads of {', '.join(map(str, HEAD_DIMENSIONS))} dimensions",
                given=what,
                remedy=REMEDY_EXACT,
            )


def check_learner(network: Any, dtype: torch.dtype, exact: bool = False) -> None:
    """Raise `ConfigError` for a learner that computes otherwise than by the operations of the table.

    Args:
        network: the learner's model.
        dtype: of the sampler's activations.
        exact: of `batch_invariant`, whose product was not compared in fp16.
    """
    from lit_qrl.network.names import is_adapted  # these bring transformers
    from lit_qrl.network.padding_free import is_padding_free
    from lit_qrl.precision.layers.lora_linear import LoRALinear
    from lit_qrl.precision.layers.one_pass import OnePassRMSNorm

    own = next(network.parameters()).dtype
    adapted = [part for part in network.modules() if is_adapted(part)]
    for differs, expected, given in (
        (
            own != dtype or dtype not in (torch.bfloat16, torch.bfloat16 if exact else torch.float16),
            "model.policy.dtype and data.engine.dtype: both bf16" + ("" if exact else ", or both fp16"),
            f"{own} and {dtype}".replace("torch.", ""),
        ),
        (
            not is_padding_free(network),
            "model.policy.packing: auto, and attn_implementation: sdpa",
            "a learner whose attention is not the padding-free one",
        ),
        (
            not any(isinstance(part, OnePassRMSNorm) for part in network.modules()),
            "model.policy.fuse: auto",
            "a learner whose norms are not fused",
        ),
        (
            exact and not all(isinstance(part, LoRALinear) and part.plain is not None for part in adapted),
            "plain LoRA on linear layers in model.policy.lora, without dropout",
            "an adapter that PEFT computes",
        ),
    ):
        if differs:
            raise ConfigError(
                "Learner and sampler would not compute alike.", expected=expected, given=given, remedy=REMEDY_EXACT
            )


def chosen(
    asked: bool | Literal["auto"],
    spec: "SamplerSpec",
    network: Any,
    dtype: torch.dtype,
    arguments: Mapping[str, Any],
    against: str | None = None,
) -> bool:
    """Return whether an engine computes as the learner does; where it would help and cannot be had, warn.

    Args:
        asked: `auto` takes it where that changes something: the learner computes in the sampler's format, which
            quantizes activations; and where it was seen to hold.
        spec: what is known of the sampler.
        network: the learner's model.
        dtype: of activations.
        arguments: of `vllm.LLM`.
        against: why it cannot be, known of the engine.
    """
    if asked != "auto":
        return asked
    if spec.format is None or not helps(spec):
        return False
    why = against or _obstacle(network, dtype, arguments)
    if why is not None and torch.cuda.is_available():
        log.warning(
            "Learner and sampler both round activations to %s, but their last bits differ before they do: %s. Such a "
            "run is hardly nearer to on-policy than an unaligned one (docs/precision.md).",
            spec.format.name,
            why,
        )
    if why is None:
        log.info("Learner and sampler compute their decoder layers with the same kernels.")
    found = installed_version()
    if why is None and found is not None and found[0][:2] != COMPARED:
        log.warning(
            "The kernels of learner and sampler were compared with vLLM %d.%d, and this is %s: the KL of the first "
            "iteration tells whether they agree here, below 1e-5.",
            *COMPARED,
            ".".join(map(str, found[0])),
        )
    return why is None


def foretold(engine: Any, spec: "SamplerSpec", network: Any, apart: bool) -> str:
    """Return what `chosen` will say on a GPU of compute capability 9.0: on, off, or what stands against it.

    Args:
        engine: a `VLLMEngine` that is not set up.
        spec: what is known of the sampler.
        network: the learner's model as it is on a GPU; its weights need not be there.
        apart: the engine is in another process.
    """
    if engine.batch_invariant:
        return "on, as batch_invariant asks"
    if engine.same_kernels != "auto":
        return "on, as it is set" if engine.same_kernels else "off, as it is set"
    if not helps(spec):
        return "off, the learner does not compute in a format that quantizes activations"
    against = APART if apart else IN_PARTS if engine.draws_together else None
    why = against or _obstacle(network, engine.choose_dtype(spec, network), engine._arguments, here=False)
    return f"cannot be had, {why}" if why else "on, on a GPU of compute capability 9.0"


def _obstacle(network: Any, dtype: torch.dtype, arguments: Mapping[str, Any], here: bool = True) -> str | None:
    try:
        check(arguments, here)
        check_decoder(network)
        check_learner(network, dtype)
    except ConfigError as error:
        return f"{error.what.rstrip('.')} ({error.given}; expected: {error.expected})"
    return None


@contextmanager
def built(enabled: bool, exact: bool = False) -> Iterator[None]:
    """Give the engine that is built inside the learner's kernels, where it is `enabled`; with `exact` all of them."""
    global _active, _exact
    _active, _exact = enabled, exact
    if not enabled:
        yield
        return
    registry: dict[str, Any] = import_module("vllm.model_executor.custom_op").op_registry_oot
    layer: Any = import_module("vllm.model_executor.layers.layernorm").RMSNorm
    registry["RMSNorm"] = _norm_of(layer)
    try:
        yield
    finally:
        del registry["RMSNorm"]


def _norm_of(layer: type[Any]) -> type[Any]:
    """Return vLLM's class of norms by the learner's kernel, as its registry of replaced layers takes it."""

    class RMSNorm(layer):
        def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
            from lit_qrl.formats.kernels import norm_triton

            if self.variance_size_override is not None or not self.has_weight:
                return super().forward_cuda(x, residual)
            flat = (-1, x.shape[-1])
            beside = None if residual is None else residual.reshape(flat)
            h, y, *_ = norm_triton.norm(x.reshape(flat), self.weight.data, self.variance_epsilon, beside)
            return y.view(x.shape) if residual is None else (y.view(x.shape), h.view(x.shape))

    return RMSNorm
