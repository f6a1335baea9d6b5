"""Kernels of a decoding step, compiled for compute capability 9.0 without such a device.

Triton's interpreter takes what its compiler refuses, such as a name that has another shape in a loop than before.
"""

from importlib import import_module

import pytest

TYPES = dict.fromkeys(
    ["x", "residual", "other", "weight", "summed", "y", "columns", "query", "keys", "values", "out"], "*bf16"
)
TYPES |= dict.fromkeys(
    ["rstd", "scales", "rows_scale", "columns_scale", "scale_a", "scale_b", "bias", "partial"], "*fp32"
)
TYPES |= dict.fromkeys(["codes", "rows", "a", "b"], "*fp8e4nv")
TYPES |= {"ended": "*i32", "last": "*i64", "eps": "fp32", "scale": "fp32"}
PARTS = {"weight": "*fp32", "parts": "*fp32"}
FORMATS, EMBEDDED = "lit_qrl.formats.kernels.", "lit_qrl.rollout.embedded."
CUT = {"BN": 64, "CUT": True, "BIASED": True}
NORM = {"ADD": True, "SCALE": True, "ROWS": 1, "SIZE": 2048}
GATED = {"BEFORE": 2, "WRITTEN": True, "ROWS": True, "COLUMNS": False, "SIZE": 128, "DEEP": 4}
KERNELS = [
    *[(f"{FORMATS}norm_triton", "_norm_kernel", {**NORM, "EXTENT": extent}) for extent in (0, 128, 2048)],
    *[(f"{FORMATS}products_triton", "_product_kernel", {**CUT, "ROWS": r, "BM": 64, "TURNED": not r}) for r in (0, 1)],
    (f"{FORMATS}products_triton", "_product_kernel", {**CUT, "ROWS": False, "BM": 64, "TURNED": False}),
    *[(f"{FORMATS}tiles_triton", "_tiles_kernel", {**GATED, "HEIGHT": height}) for height in (16, 128)],
    (f"{EMBEDDED}attention_triton", "_part_kernel", {"ROWS": 16, "DIM": 128, "VALUE_DIM": 128, "BLOCK": 32}),
]  # fmt: skip


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize(("module", "name", "constants"), KERNELS)
def test_it_compiles(module, name, constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(module), name)
    kernel, own = (
        getattr(kernel, "_kernel", kernel),
        {"weight": "*fp32", "parts": "*fp32"} if "attention" in module else {},
    )
    of = {one: "constexpr" if one in constants else (TYPES | own).get(one, "i32") for one in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=of, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
