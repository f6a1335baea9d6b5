"""Cells of the table through vLLM: each works, publishes far apart included, or is refused in one paragraph."""

import pytest

from tests.families import vllm_cells
from tests.families.configs import BY_TYPE, FAMILIES

pytestmark = pytest.mark.vllm

IN_CI = {("phi3", "fp8_tensor"), ("phi3", "nvfp4"), ("deepseek_v3", "plain"), ("gpt2", "plain")}
"""A layer that the checkpoint fuses, latent attention, and matrices that vLLM's loader turns; the others are `slow`."""
CELLS = [
    pytest.param(
        family.model_type,
        name,
        marks=[] if (family.model_type, name) in IN_CI else [pytest.mark.slow],
        id=f"{family.model_type}-{name}",
    )
    for family in FAMILIES
    if family.vllm
    for name in vllm_cells.FORMATS
]


@pytest.mark.parametrize(("model_type", "name"), CELLS)
def test_a_cell_works_or_is_refused(model_type, name):
    cell = vllm_cells.run_cell(BY_TYPE[model_type], name)
    assert cell["outcome"] in ({"works"} if (model_type, name) in IN_CI else {"works", "refused"}), cell
    if cell["outcome"] == "refused":
        assert "Expected:" in cell["message"]
        assert "\n" not in cell["message"]
