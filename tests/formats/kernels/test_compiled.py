"""Kernels of a decoding step, compiled for compute capability 9.0 without such a device.

Triton's interpreter takes what its compiler refuses, such as a name that has another shape in a loop than before.
"""

import pytest

BF16, FP32, FP8 = "*bf16", "*fp32", "*fp8e4nv"
NORM = dict.fromkeys(["x", "residual", "weight", "summed", "y"], BF16) | {"rstd": FP32, "codes": FP8, "scales": FP32}
PARTS = dict.fromkeys(["query", "keys", "values", "out"], BF16) | {"parts": FP32, "weight": FP32, "last": "*i64"}
PRODUCT = {"a": FP8, "b": FP8, "scale_a": FP32, "scale_b": FP32, "bias": FP32, "out": BF16, "partial": FP32}
TILES = dict.fromkeys(["x", "other", "weight", "y", "columns"], BF16) | {"rows": FP8}
ENDED = {"ended": "*i32"}


def compiled(kernel, types, warps=4, stages=3, **constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(kernel, "_kernel", kernel)
    of = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    source = ASTSource(fn=function, signature=of, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    assert made.asm["cubin"]


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize("extent", [0, 128, 2048])
def test_a_norm(extent):
    from lit_qrl.formats.kernels import norm_triton

    compiled(norm_triton._norm_kernel, {**NORM, "eps": "fp32"}, ADD=True, SCALE=True, EXTENT=extent, ROWS=1, SIZE=2048)


@pytest.mark.vllm
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
def test_a_product_of_few_rows(by_rows, rows):
    from lit_qrl.formats.kernels import products_triton

    cut = {"ROWS": by_rows, "BM": rows, "BN": 64, "TURNED": rows < 64, "CUT": True, "BIASED": True}
    compiled(products_triton._product_kernel, PRODUCT | ENDED, **cut)


@pytest.mark.vllm
def test_attention():
    from lit_qrl.rollout.embedded import attention_triton

    sizes = {"ROWS": 16, "DIM": 128, "VALUE_DIM": 128, "BLOCK": attention_triton.BLOCK}
    compiled(attention_triton._part_kernel, {**PARTS, **ENDED, "scale": "fp32"}, **sizes)


@pytest.mark.vllm
@pytest.mark.parametrize("height", [16, 128])
def test_a_gated_tile_with_codes(height):
    from lit_qrl.formats.kernels import tiles_triton

    scales = dict.fromkeys(["rstd", "rows_scale", "columns_scale"], FP32)
    what = {"BEFORE": tiles_triton.GATED, "WRITTEN": True, "ROWS": True, "COLUMNS": False, "HEIGHT": height}
    compiled(tiles_triton._tiles_kernel, TILES | scales, **what, SIZE=tiles_triton.TILE, DEEP=tiles_triton.DEEP)
