"""vLLM's batch-invariant mode: what it needs, what of it the learner must not notice, and the kernels that it means."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.formats import support
from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.sampler_kernels import check_decoder
from lit_qrl.precision.vllm_kernels.exact import VLLMKernels
from lit_qrl.rollout.vllm.installation import installed_version
from lit_qrl.rollout.vllm.same_kernels import HEAD_DIMENSIONS

VERSION, CAPABILITY = (0, 26), (9, 0)
"""Of vLLM and of the GPU, with which the kernels of the mode are those that the learner calls."""
ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "attention_backend": ("FLASH_ATTN",),
    "compilation_config": ({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},),
    "quantization": (),
    "hf_overrides": (),
}
"""Arguments of `vllm.LLM` that choose other kernels, and the values that do not."""
ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
_set = False
REMEDY = "Set data.engine.batch_invariant to false, or use TransformersEngine."


def asked_for(enabled: bool) -> bool:
    """Return `enabled`; where it is True, set what vLLM reads from the environment, else take it back.

    Its second model runner keeps logits in bf16 when it divides them by a temperature; the first raises them to fp32,
    as the learner does.
    """
    global _set
    if enabled:
        os.environ.update(ENVIRONMENT)
        _set = True
    elif _set:  # for an earlier engine of this process
        for name in ENVIRONMENT:
            os.environ.pop(name, None)
        _set = False
    return enabled


def check(format: NumberFormat | None, arguments: Mapping[str, Any], adapters: int) -> None:
    """Raise `ConfigError` for a host without the kernels that the learner calls, or settings that choose others.

    Args:
        format: of the sampler's layers; None where they are plain.
        arguments: of `vllm.LLM`.
        adapters: the largest rank of adapters published apart from their base; 0 for none.
    """
    found = installed_version()
    version = found[0] if found is not None else (0, 0, 0)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    for fits, what, expected, given in (
        (capability == CAPABILITY, "This host's GPU", "compute capability 9.0", capability or "no GPU"),
        (version[:2] == VERSION, "The installed vLLM", "vLLM 0.26", ".".join(map(str, version))),
    ):
        if not fits:
            raise ConfigError(
                f"{what} has not the kernels of vLLM's batch-invariant mode that the learner calls.",
                expected=expected,
                given=given,
                remedy=REMEDY,
            )
    varies = None if format is None else support.row_of(format).vllm_varies
    if format is not None and varies is not None:
        known = support.names_where(lambda row: "cuda" in row.vllm and row.vllm_varies is None)
        raise ConfigError(
            f"{varies}, by which vLLM multiplies {format.name} on a GPU, adds in an order that depends on the batch.",
            expected=f"publisher.format: {', '.join(known)}",
            given=format.name,
            remedy="Choose one of them, or set data.engine.batch_invariant to false.",
        )
    if adapters:
        raise ConfigError(
            "vLLM's kernels for adapters are not those of the learner.",
            expected="data.engine.max_lora_rank: 0",
            given=adapters,
            remedy=REMEDY,
        )
    for name, values in ARGUMENTS.items():
        if arguments.get(name) is not None and arguments[name] not in values:
            raise ConfigError(
                "An argument of data.engine.engine_args chooses other kernels than the learner's.",
                expected=f"{name} left out",
                given=f"{name}: {arguments[name]}",
                remedy=REMEDY,
            )


def check_model(network: Any, dtype: torch.dtype | None = None) -> None:
    """Raise `ConfigError` for a model that the learner cannot compute by these kernels.

    Args:
        network: the learner's model.
        dtype: of the sampler's activations, where it is known.
    """
    config = network.config.get_text_config()
    check_decoder(config, "vLLM")
    dimensions = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if dimensions not in HEAD_DIMENSIONS:
        raise ConfigError(
            "FlashAttention 3 was not seen to add in the same order for one token as for several.",
            expected=f"heads of {', '.join(map(str, HEAD_DIMENSIONS))} dimensions",
            given=dimensions,
            remedy=REMEDY,
        )
    if dtype is None:
        return
    own = next(network.parameters()).dtype
    if not dtype == own == torch.bfloat16:
        raise ConfigError(
            "Learner and sampler must compute in bf16 to agree to the last bit.",
            expected="model.policy.dtype and data.engine.dtype: bf16",
            given=f"{own} and {dtype}".replace("torch.", ""),
            remedy=REMEDY,
        )


@contextmanager
def learner_left_alone(enabled: bool) -> Iterator[None]:
    """Undo what the mode's start inside replaces in torch for the whole process, where it is `enabled`.

    It replaces `torch.bmm` by a kernel without gradients, and operators of the dispatcher, among them a mean over
    dimensions that returns fp32 whatever it is given; and it takes cuBLAS its workspace and NCCL its channels. What is
    called here is the softmax of the sampler and its logarithm, which are put back; the sampler's GEMMs are not those
    of cuBLAS, so that the learner's backward pass may stay fast. The library of matrix products stays cuBLASLt, which
    alone takes the mode's sums without split parts.
    """
    bmm, variables, precision = torch.bmm, dict(os.environ), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if enabled:
            torch.bmm = bmm
            for name in [name for name in os.environ if name.startswith(("CUBLAS", "NCCL"))]:
                os.environ.pop(name)
            os.environ.update({name: value for name, value in variables.items() if name not in os.environ})
            torch.set_float32_matmul_precision(precision)
            _keep_softmax_alone()


_library: Any = None


def _keep_softmax_alone() -> None:
    global _library
    theirs: Any = import_module("vllm.model_executor.layers.batch_invariant")
    if theirs._batch_invariant_LIB is None:
        return
    theirs._batch_invariant_LIB._destroy()
    theirs._batch_invariant_LIB = None  # the mode itself stays on: it is not entered again
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("aten::_log_softmax", theirs._log_softmax_batch_invariant, "CUDA")
    _library.impl("aten::_softmax", theirs.softmax_batch_invariant, "CUDA")


def kernels(model: Any, dtype: torch.dtype) -> VLLMKernels:
    """Return the kernels of a live model.

    Args:
        model: vLLM's own.
        dtype: of its activations.
    """
    rotary = model.model.layers[0].self_attn.rotary_emb
    # a copy, since a sleeping engine's memory is taken away
    return VLLMKernels(rotary.cos_sin_cache.to(dtype, copy=True))
