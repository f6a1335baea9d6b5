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
steps. What is left is a handful of tokens in some iterations, by a cause that was not found. `batch_invariant` ends
that too, at a price.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm.installation import installed_version

if TYPE_CHECKING:
    from lit_qrl.rollout.engine import SamplerSpec

log = logging.getLogger(__name__)

HEAD_DIMENSIONS = (64, 96, 128, 256)
"""For which FlashAttention 3 was seen to give a token the same bits in a whole sequence and alone."""
COMPARED = (0, 26)
"""The version of vLLM that was looked at so."""
_active = False
REMEDY = "Set data.engine.same_kernels to false."
APART = "vLLM is in a process of its own"
IN_PARTS = "each process of tensor_parallel_size quantizes and adds its own part of a row"


def active() -> bool:
    """Return whether the engine of this process computes as the learner does."""
    return _active


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
    for fits, what, expected, given in (
        (not here or capability == (9, 0), "This host's GPU", "compute capability 9.0", capability or "no GPU"),
        (arguments.get("attention_backend") in (None, "FLASH_ATTN"), "The attention of engine_args", "FLASH_ATTN",
         arguments.get("attention_backend")),
    ):  # fmt: skip
        if not fits:
            raise ConfigError(
                f"{what} has not the kernels by which learner and sampler compute alike.",
                expected=expected,
                given=given,
                remedy=REMEDY,
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
        return "off, batch_invariant makes more equal"
    if engine.same_kernels != "auto":
        return "on, as it is set" if engine.same_kernels else "off, as it is set"
    if not helps(spec):
        return "off, the learner does not compute in a format that quantizes activations"
    against = APART if apart else IN_PARTS if engine.draws_together else None
    why = against or _obstacle(network, engine.choose_dtype(spec, network), engine._arguments, here=False)
    return f"cannot be had, {why}" if why else "on, on a GPU of compute capability 9.0"


def _obstacle(network: Any, dtype: torch.dtype, arguments: Mapping[str, Any], here: bool = True) -> str | None:
    from lit_qrl.network.padding_free import is_padding_free  # these bring transformers
    from lit_qrl.network.sampler_kernels import check_decoder
    from lit_qrl.precision.layers.one_pass import OnePassRMSNorm

    config = network.config.get_text_config()
    dimensions = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = next(network.parameters()).dtype
    try:
        check(arguments, here)
        check_decoder(config, "vLLM")
    except ConfigError as error:
        return f"{error.what.rstrip('.')} ({error.given})"
    if dimensions not in HEAD_DIMENSIONS:
        return f"heads of {dimensions} dimensions were not compared (but {', '.join(map(str, HEAD_DIMENSIONS))})"
    if own != dtype or dtype not in (torch.bfloat16, torch.float16):
        return f"the learner's weights are {own}, the sampler's {dtype}, not both of one 16-bit kind".replace(
            "torch.", ""
        )
    if not is_padding_free(network):
        return "the learner's attention is not the padding-free one (model.policy: packing, attn_implementation)"
    if not any(isinstance(part, OnePassRMSNorm) for part in network.modules()):
        return "the learner's norms are not fused (model.policy.fuse)"
    return None


@contextmanager
def built(enabled: bool) -> Iterator[None]:
    """Give the engine that is built inside the learner's norms, and attention in one piece, where it is `enabled`."""
    global _active
    _active = enabled
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
            h, y, _ = norm_triton.norm(x.reshape(flat), self.weight.data, self.variance_epsilon, beside)
            return y.view(x.shape) if residual is None else (y.view(x.shape), h.view(x.shape))

    return RMSNorm
