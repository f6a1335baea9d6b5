"""What vLLM's CPU build gets wrong, or lacks."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from lit_qrl.rollout.vllm.patches import Patch

SHARED_MEMORY = Path("/dev/shm")


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes of activations and their scale, under vLLM's name and arguments.

    >>> codes, scale = scaled_fp8_quant(torch.tensor([[1.0, -448.0]]))
    >>> codes.float().tolist(), scale.tolist()
    ([[1.0, -448.0]], [1.0])
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    x = input.float()
    if scale is None:
        amax = x.abs().amax(dim=-1, keepdim=True) if use_per_token_if_dynamic else x.abs().amax().reshape(1)
        scale = (amax / limit).clamp_min(torch.finfo(torch.float32).tiny)
    factor = scale.float()
    if factor.ndim == 2 and factor.numel() > 1:
        factor = factor.repeat_interleave(x.shape[0] // factor.shape[0], dim=0)
        factor = factor.repeat_interleave(x.shape[1] // factor.shape[1], dim=1)
    codes = (x / factor).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return (codes if output is None else output.copy_(codes)), scale


def keeping_operands(original: Any) -> Any:
    """Return the function that makes a handle, which then keeps weight and scales alive."""

    def create(weight: Tensor, scales: Tensor, *args: Any) -> Any:
        handle = original(weight, scales, *args)
        handle.operands = weight, scales
        return handle

    return create


def by_head(original: Any) -> Any:
    """Return the rotary embedding, by vLLM's own formula in torch for queries that have their heads apart."""

    def forward_cpu(rotary: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.ndim == positions.ndim + 1:
            return original(rotary, positions, query, key)
        return rotary.forward_native(positions, query, key)

    return forward_cpu


def by_token(original: Any) -> Any:
    """Return the wrapper's function for as many rows as there are tokens."""

    def add_lora_logits(wrapper: Any, y: Tensor, x: Tensor, *args: Any, **options: Any) -> None:
        rows, by_sequence = x.reshape(-1, x.shape[-1]).shape[0], wrapper.sampler_indices
        if rows == by_sequence.numel():
            original(wrapper, y, x, *args, **options)
            return
        # An engine of ours has one adapter, so all sequences of a batch have the same.
        kept, count = by_sequence.clone(), wrapper.indices_len[1]
        wrapper._sampler_indices[:rows], wrapper.indices_len[1] = kept[0], rows
        try:
            original(wrapper, y, x, *args, **options)
        finally:
            wrapper._sampler_indices[: kept.numel()], wrapper.indices_len[1] = kept, count

    return add_lora_logits


def of_the_run(original: Any) -> Any:
    """Return the meeting in shared memory under a name that the processes draw; it is given back once all are there."""

    def init_cpu_shm(shared: Any) -> int:
        group = shared.communicator.device_group
        drawn = [os.urandom(8).hex()]
        distributed.broadcast_object_list(drawn, group=group, group_src=0)
        shared.group_name = f"{shared.group_name}-{drawn[0]}"
        handle = original(shared)
        (SHARED_MEMORY / f"{shared.group_name}_{shared.communicator.rank}".lstrip("/")).unlink(missing_ok=True)
        return handle

    return init_cpu_shm


def by_torch(original: Any) -> Any:
    """Return the product of FP8 codes without oneDNN, as torch computes it on other CPUs."""

    def apply_scaled_mm(kernel: Any, **operands: Any) -> Tensor:
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return original(kernel, **operands)
        finally:
            torch._C._set_mkldnn_enabled(before)

    return apply_scaled_mm


_OPS = "vllm._custom_ops"
_PRODUCTS = "vllm.model_executor.kernels.linear.scaled_mm.pytorch"
_ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding"
_PUNICA = "vllm.lora.punica_wrapper.punica"
_SHM = "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm"
CHANGES = (
    Patch(
        "fp8_activations",
        "the CPU build lacks the quantization of activations to FP8",
        "no operator static_scaled_fp8_quant",
        {f"{_OPS}:scaled_fp8_quant": lambda original: scaled_fp8_quant},
        device="cpu",
        sources={f"{_OPS}:scaled_fp8_quant": ("27cb2a41",)},
    ),
    Patch(
        "amx_kernels",
        "the kernels for AMX take 16-bit inputs alone, and leave activations as they are where a format quantizes them",
        "in fp32 int8_channel ends the process, and on such a CPU a format is computed otherwise than on others",
        {"torch.cpu:_is_amx_tile_supported": lambda original: lambda: False},
        device="cpu",
    ),
    Patch(
        "fp8_products",
        "torch multiplies FP8 codes by oneDNN where the CPU has AMX, whose product is a reference there",
        "256 rows by 128 × 384 weights take 400 ms instead of 0.6",
        {
            f"{_PRODUCTS}:{scales}TorchFP8ScaledMMLinearKernel.apply_scaled_mm": by_torch
            for scales in ("PerTensor", "ChannelWise")
        },
        device="cpu",
    ),
    Patch(
        "onednn_operands",
        "the handle of the INT8 GEMM holds a bare pointer to scales that a reload frees",
        "NaN after the second publish of int8_channel",
        {f"{_OPS}:create_onednn_scaled_mm": keeping_operands},
        device="cpu",
    ),
    Patch(
        "rotary_heads",
        "the operator takes the heads of queries “tokens heads dim” for tokens from the second one on",
        "log-probs of latent attention are off by 0.25 nats",
        {f"{_ROTARY}.forward_cpu": by_head},
        [f"{_ROTARY}.forward_native"],
        device="cpu",
        sources={f"{_ROTARY}.forward_cpu": ("4ae2d722",)},
    ),
    Patch(
        "scores_under_adapters",
        "the output head looks adapters up by sequence where log-probs of a prompt ask for one row per token",
        "several sequences cannot be scored under an adapter",
        {f"{_PUNICA}_cpu:PunicaWrapperCPU.add_lora_logits": by_token},
        [f"{_PUNICA}_base:PunicaWrapperBase.{name}" for name in ("sampler_indices", "_sampler_indices", "indices_len")],
        device="cpu",
        sources={f"{_PUNICA}_cpu:PunicaWrapperCPU.add_lora_logits": ("3cdf3bea", "c82ece1b")},
    ),
    Patch(
        "shared_memory_names",
        "two runs on one host, each with an engine of several processes, meet in the same shared memory",
        "a run that was killed leaves the name taken, and the next one hangs",
        {_SHM: of_the_run},
        device="cpu",
    ),
)
