"""vLLM's CUTLASS kernel for block-scaled FP8 is made for many rows: from 8 to 512 it takes longer than bf16's product.

Ours (`formats/kernels/blocks_triton.py`) multiplies few rows, of the same codes and scales, which stay where a publish
puts them. Sums of 128 products are added in fp32 in either, so that results differ in last bits. More rows, other
devices and shapes, and batch-invariant runs stay with vLLM's kernel.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lit_qrl.formats.kernels import gemm
from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

MOST_ROWS = 512
"""Rows from which on vLLM's kernel is as fast."""


def _few_rows(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    operator = _operator()

    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
        weight, scale = layer.weight, _block_scale(layer)
        if scale is None or not takes(x, weight, scale):
            return original(self, layer, x, bias, **named)
        codes, scales = self.quant_fp8(x.view(-1, x.shape[-1]), None, None)
        dtype = self.config.out_dtype or x.dtype
        multiply = operator if torch.compiler.is_compiling() else product
        return multiply(codes, scales, weight, scale, bias, dtype).view(*x.shape[:-1], weight.shape[0])

    return apply_weights


def _block_scale(layer: Any) -> Tensor | None:
    found = (getattr(layer, name, None) for name in ("weight_scale", "weight_scale_inv"))
    return next((scale for scale in found if scale is not None), None)


def takes(x: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Return whether `product` multiplies such inputs, "... k", by a weight "n k" with a scale for each block."""
    (n, k), block = weight.shape, gemm.BLOCK
    whole = n % block == k % block == 0 and scale.shape == (n // block, k // block)
    plain = whole and scale.dtype == torch.float32 and scale.is_contiguous() and weight.is_contiguous()
    return plain and x.device.type == "cuda" and _here() and not _invariant()


@torch.compiler.assume_constant_result
def _here() -> bool:
    return gemm.fp8_block_gemm(torch.device("cuda", torch.cuda.current_device()), (gemm.BLOCK, gemm.BLOCK))


def product(
    codes: Tensor, scales: Tensor, weight: Tensor, block_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `(codes · scales) @ (weight · block_scales).T + bias`: "m n".

    Args:
        codes: "m k", float8_e4m3fn.
        scales: "m k/128", fp32.
        weight: "n k", float8_e4m3fn.
        block_scales: "n/128 k/128", fp32.
        bias: " n", or None.
        dtype: of the result.
    """
    if codes.shape[0] <= MOST_ROWS:
        from lit_qrl.formats.kernels import blocks_triton

        return blocks_triton.product(codes, scales, weight, block_scales, bias, dtype)
    from vllm import _custom_ops as ops

    out = ops.cutlass_scaled_mm(codes, weight.t(), scale_a=scales, scale_b=block_scales.t(), out_dtype=dtype)
    return out if bias is None else out.add_(bias)


@lru_cache
def _operator() -> Any:
    """Return `product` as one operator, into which torch's compiler does not look: it chooses by the number of rows."""

    def made_up(codes: Tensor, scales: Tensor, weight: Tensor, block_scales: Tensor, bias: Any, dtype: Any) -> Tensor:
        return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=dtype)

    made = torch.library.custom_op("lit_qrl::block_product", product, mutates_args=())
    made.register_fake(made_up)
    return torch.ops.lit_qrl.block_product


def _invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM has a block-scaled product that is faster than bf16's for a few rows, as DeepGEMM's without compiling it",
    {
        "vllm.model_executor.kernels.linear.scaled_mm.cutlass:CutlassFp8BlockScaledMMKernel.apply_weights": _few_rows,
    },
    device="cuda",
)
