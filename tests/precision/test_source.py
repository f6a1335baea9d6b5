import pytest
import torch
from peft import LoraConfig

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.precision.source import WeightSource, unchanged
from tests.tiny_run import model_folder

LAYER = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture
def policy(tmp_path):
    made = CausalPolicy(model_folder(tmp_path), lora=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    made.configure()
    with torch.no_grad():
        for name, parameter in made.network.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return made


def merged(policy, name):
    """W + (α / r) B A, in a line of its own."""
    layer = policy.network.get_submodule(name)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return (layer.base_layer.weight + 8 / 4 * b @ a).detach()


def test_whole_is_merged_changed_and_quantized(policy):
    format = formats.get("int4_group", group_size=32)
    source = WeightSource(policy, format)
    got = dict(source.whole(unchanged, None))
    q = format.quantize(merged(policy, LAYER))
    assert torch.equal(got[f"{LAYER}.weight_packed"], q.codes)
    doubled = dict(source.whole(lambda name, tensor: 2 * tensor if name == NORM else tensor, None))
    assert torch.equal(doubled[NORM], 2 * got[NORM])
    assert torch.equal(doubled[f"{LAYER}.weight_packed"], q.codes)


def test_base_and_plain_and_adapter(policy):
    source = WeightSource(policy, formats.get("bf16"))
    base = dict(source.base(None))
    assert torch.equal(base[f"{LAYER}.weight"], policy.network.get_submodule(LAYER).base_layer.weight.bfloat16())
    plain = dict(source.plain(None))
    torch.testing.assert_close(plain[f"{LAYER}.weight"], merged(policy, LAYER))
    assert plain[f"{LAYER}.weight"].dtype == torch.float32
    factors = dict(source.adapter(torch.bfloat16))
    assert {tensor.dtype for tensor in factors.values()} == {torch.bfloat16}
    assert len(factors) == 2 * len(source.shapes)


def test_shapes_leave_out_what_is_excluded(policy):
    shapes = WeightSource(policy, formats.get("fp8_row")).shapes
    layer = policy.network.get_submodule(LAYER)
    assert shapes[LAYER] == (layer.out_features, layer.in_features)
    assert not any("base_layer" in name or "lm_head" in name for name in shapes)
    fewer = WeightSource(policy, formats.get("fp8_row"), ["*.down_proj"]).shapes
    assert set(shapes) - set(fewer) == {name for name in shapes if name.endswith("down_proj")}


def test_only_norms_may_change_over_an_unchanged_base(policy):
    source = WeightSource(policy, None)
    assert source.changed_norms(unchanged) == {}
    changed = source.changed_norms(lambda name, tensor: tensor + 1 if name == NORM else tensor)
    assert list(changed) == [NORM]
    assert torch.equal(changed[NORM], source.norms([NORM])[NORM] + 1)
    with pytest.raises(ConfigError, match=rf"changes {LAYER}\.weight.*merged"):
        source.changed_norms(lambda name, tensor: 2 * tensor if name == f"{LAYER}.weight" else tensor)


def test_the_base_s_state_changes_with_any_frozen_tensor_and_no_other(policy):
    source = WeightSource(policy, None)
    before = source.base_state()
    layer = policy.network.get_submodule(LAYER)
    with torch.no_grad():
        layer.lora_A["default"].weight.add_(1)
    assert source.base_state() == before
    with torch.no_grad():
        layer.base_layer.weight.add_(1)
    assert source.base_state() != before


def test_a_plugin_s_codes_count_only_where_it_has_the_sampler_s_format():
    fp8, row = QATAligned("fp8_row"), formats.get("fp8_row")
    assert fp8.source(None, row).aligned
    other = fp8.source(None, formats.get("bf16"), ["*.o_proj"], head=True)
    assert (type(other), other.aligned, other.exclude, other.head) == (WeightSource, False, ("*.o_proj",), True)
    assert NVFP4LoRA().source(None, formats.get("nvfp4")).packed


@pytest.mark.parametrize(
    ("engine", "format", "expected"),
    [(torch.float16, "bf16", torch.float16), (None, "bf16", torch.bfloat16), (None, "fp8_row", None)],
)
def test_plain_tensors_go_in_the_engine_s_dtype_then_the_format_s(engine, format, expected):
    assert WeightSource(None, formats.get(format)).plain_dtype(engine) == expected
