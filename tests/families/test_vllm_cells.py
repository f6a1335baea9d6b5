"""Cells of the table through vLLM: each works, publishes far apart included, or is refused in one paragraph."""

from dataclasses import replace

import pytest

from lit_qrl.network.structure import FUSED_LAYERS
from lit_qrl.rollout.vllm import models
from tests.families import vllm_cells
from tests.families.configs import BY_TYPE, FAMILIES
from tests.families.page import kept

pytestmark = pytest.mark.vllm

IN_CI = {("phi3", "fp8_tensor"), ("phi3", "nvfp4"), ("deepseek_v3", "plain"), ("gpt2", "plain"), ("mamba2", "bf16")}
"""A layer that the checkpoint fuses, latent attention, matrices that vLLM's loader turns, and a convolution that a CPU
packs beside a view of it; the others are `slow`."""
CELLS = [
    pytest.param(
        family.model_type,
        name,
        marks=[] if (family.model_type, name) in IN_CI else [pytest.mark.slow],
        id=f"{family.model_type}-{name}",
    )
    for family in FAMILIES
    for name in vllm_cells.FORMATS
]


@pytest.mark.parametrize(("model_type", "name"), CELLS)
def test_a_cell_works_or_is_refused(model_type, name):
    cell = vllm_cells.run_cell(BY_TYPE[model_type], name)
    column = f"publish/{'auto' if name == 'plain' else name}"
    told = kept(BY_TYPE[model_type]).get("vllm", {}).get(column, {}).get("state")
    assert cell["outcome"] in ({"works", "refused"} if told is None or not vllm_cells.of_the_table() else {told}), cell
    if cell["outcome"] == "refused":
        assert "Expected:" in cell["message"]
        assert "\n" not in cell["message"]


@pytest.mark.parametrize("name", ["fp8_row", pytest.param("plain", marks=pytest.mark.slow)])
def test_rows_that_the_loader_sorts_are_verified(name):
    falcon = BY_TYPE["falcon"]
    several = replace(falcon, options={**falcon.options, "new_decoder_architecture": True, "num_kv_heads": 2})
    cell = vllm_cells.run_cell(several, name)
    assert cell["outcome"] == "works", cell
    assert cell["verified"] == 1.0
    assert cell["along_routes"]


@pytest.mark.skipif(not vllm_cells.of_the_table(), reason="an older vLLM knows fewer")
def test_every_layer_that_vllm_makes_of_several_has_its_row():
    packed = {}
    for family in FAMILIES:
        try:
            known = models._class_of(family.vllm)
        except ImportError:  # for want of torchvision
            continue
        packed |= getattr(known, "packed_modules_mapping", {})
    fused = {part: name for name, parts in packed.items() if len(parts) > 1 for part in parts}
    assert len(fused) >= 7
    assert fused.items() <= FUSED_LAYERS.items()
