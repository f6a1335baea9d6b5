"""vLLM's CUTLASS kernel for block-scaled FP8 goes by tiles of many rows: for 128 sequences it takes as long as bf16's.

A weight that is too small to give every multiprocessor a tile goes through our product, which cuts it along its inputs
(`formats/kernels/products_triton.py`); others, and more rows, go through cuBLASLt. Codes and scales stay where a
publish puts them and are the same numbers; sums are added in another order. Other devices and shapes, and
batch-invariant runs, stay with vLLM. Scales of rows do too, whose CUTLASS kernel is as fast as ours was.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lit_qrl.formats.kernels import gemm
from lit_qrl.rollout.vllm.patches.codes_in_passing import kept_codes
from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

BLOCK = gemm.BLOCK
MOST_ROWS, FEW_ROWS = 128, 32
"""Rows up to which ours is faster for weights of few tiles, and for all."""
MOST_TILES = 132
"""Tiles of 128 outputs from which on a weight keeps an H200's multiprocessors busy."""


def ours(m: int, n: int) -> bool:
    """Return whether our product is the fastest for `m` rows and a weight of `n` rows."""
    return m <= FEW_ROWS or (m <= MOST_ROWS and n // BLOCK < MOST_TILES)


def by_blocks(
    codes: Tensor, scales: Tensor, weight: Tensor, block_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `(codes · scales) @ (weight · block_scales).T + bias`: "m n".

    Args:
        codes: "m k", float8_e4m3fn.
        scales: "m k/128", fp32, column by column.
        weight: "n k", float8_e4m3fn.
        block_scales: "n/128 k/128", fp32.
        bias: " n", or None.
        dtype: of the result.
    """
    (m, k), n = codes.shape, weight.shape[0]
    if ours(m, n):
        from lit_qrl.formats.kernels import products_triton

        return products_triton.product(codes, scales, weight, block_scales, bias, dtype)
    if m % 4 == 0 and k % (4 * BLOCK) == 0:  # cuBLASLt wants scales in fours; these need no copy
        out = gemm.block_product(codes, scales, weight, block_scales.t(), dtype)
    else:
        from vllm import _custom_ops as ops

        out = ops.cutlass_scaled_mm(codes, weight.t(), scale_a=scales, scale_b=block_scales.t(), out_dtype=dtype)
    return out if bias is None else out.add_(bias)


def _blocks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    operator = _operator()

    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor:
        weight, scale = layer.weight, _block_scale(layer)
        (n, k), dtype = weight.shape, self.config.out_dtype or x.dtype
        if scale is None or not _of_blocks(scale, n, k) or not takes(x, weight, scale):
            return original(self, layer, x, bias, **named)
        codes, scales = kept_codes(x) or self.quant_fp8(x.view(-1, k), None, None)
        multiply = operator if torch.compiler.is_compiling() else by_blocks
        return multiply(codes, scales, weight, scale, bias, dtype).view(*x.shape[:-1], n)

    return apply_weights


def _of_blocks(scale: Tensor, n: int, k: int) -> bool:
    return scale.shape == (n // BLOCK, k // BLOCK) and scale.is_contiguous()


def _block_scale(layer: Any) -> Tensor | None:
    found = (getattr(layer, name, None) for name in ("weight_scale", "weight_scale_inv"))
    return next((scale for scale in found if scale is not None), None)


def takes(x: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Return whether such inputs, "... k", and a weight "n k" with its scales are what our product multiplies."""
    whole = weight.shape[0] % BLOCK == weight.shape[1] % BLOCK == 0 and weight.is_contiguous()
    return whole and scale.dtype == torch.float32 and x.device.type == "cuda" and _here() and not _invariant()


@torch.compiler.assume_constant_result
def _here() -> bool:
    return gemm.fp8_block_gemm(torch.device("cuda", torch.cuda.current_device()), (BLOCK, BLOCK))


@lru_cache
def _operator() -> Any:
    """Return `by_blocks` as one operator; torch's compiler does not look into it, for it chooses by the rows."""

    def made_up(codes: Tensor, scales: Tensor, weight: Tensor, block_scales: Tensor, bias: Any, dtype: Any) -> Tensor:
        return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=dtype)

    made = torch.library.custom_op("lit_qrl::by_blocks", by_blocks, mutates_args=())
    made.register_fake(made_up)
    return torch.ops.lit_qrl.by_blocks


def _invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM has a block-scaled product for few rows that cuts a weight along its inputs",
    {"vllm.model_executor.kernels.linear.scaled_mm.cutlass:CutlassFp8BlockScaledMMKernel.apply_weights": _blocks},
    device="cuda",
)
