import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from tests.formats.oracle import same_bits, weights

ALL = formats.names()


@pytest.mark.parametrize("name", ALL)
def test_a_name_gives_its_format(name):
    format = formats.get(name)
    assert format.name == name
    assert formats.get(format) is format
    assert hash(format) == hash(formats.get(name))
    assert format == formats.get(name)


def test_options_stand_behind_the_name():
    assert formats.get("int4_group:group_size=32,activations=int8") == formats.Int4Group(32, "int8")
    assert formats.get("int4_group:activations=null") == formats.Int4Group()
    assert formats.get("nvfp4:four_over_six") == formats.get("nvfp4:four_over_six=true") != formats.get("nvfp4")
    with pytest.raises(ConfigError, match="already built"):
        formats.get(formats.Int4Group(), group_size=32)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8_rows", "fp8_rows.*Did you mean 'fp8_row'"),
        ("int4_group:groupsize=32", "no option 'groupsize'.*Did you mean 'group_size'"),
        ("int4_group:group_size=many", "group_size of int4_group.*a whole number.*many"),
        ("nvfp4:four_over_six=1", "four_over_six of nvfp4.*true or false.*1"),
    ],
)
def test_an_unknown_name_or_option_says_what_exists(name, said):
    with pytest.raises(ConfigError, match=said):
        formats.get(name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(name, value):
    weight = torch.randn(128, 128)
    weight[3, 5] = value
    with pytest.raises(ValueError, match="NaN or inf"):
        formats.get(name).quantize(weight)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_then_load_gives_the_same_weight(name, dtype):
    format = formats.get(name)
    weight = weights(dtype)["random"]
    q = format.quantize(weight)
    exported = dict(format.export(q, "model.layers.0.mlp.up_proj"))
    assert all(key.startswith("model.layers.0.mlp.up_proj.weight") for key in exported)
    suffixed = {key.removeprefix("model.layers.0.mlp.up_proj."): tensor for key, tensor in exported.items()}
    saved = {key.removeprefix("x."): tensor for key, tensor in format.checkpoint(q, "x")}
    for tensors in (suffixed, saved):
        loaded = format.load(tensors, q.shape)
        assert same_bits(loaded.codes, q.codes)
        assert loaded.shape == (256, 384)
        assert torch.equal(format.dequantize(loaded), format.dequantize(q))


@pytest.mark.parametrize("name", ALL)
def test_a_checkpoint_of_another_shape_is_refused(name):
    format = formats.get(name)
    exported = dict(format.export(format.quantize(torch.randn(256, 128)), "a"))
    with pytest.raises((ValueError, RuntimeError)):
        format.load({key.removeprefix("a."): tensor for key, tensor in exported.items()}, (128, 128))


@pytest.mark.parametrize("name", ALL)
def test_bits_per_weight_is_what_a_large_layer_takes(name):
    format = formats.get(name)
    exported = dict(format.export(format.quantize(torch.randn(1024, 1024).bfloat16()), "a"))
    taken = sum(t.numel() * t.element_size() * 8 for key, t in exported.items() if not key.endswith("shape"))
    assert taken / 1024**2 == pytest.approx(format.bits_per_weight, rel=0.01)


@pytest.mark.parametrize("name", ALL)
def test_the_configuration_is_read_back_by_compressed_tensors(name):
    from compressed_tensors.quantization import QuantizationConfig

    config = formats.get(name).quantization_config(ignore=["lm_head", "model.layers.0.mlp.down_proj"])
    if name in ("bf16", "fp16", "fp32", "nf4"):  # no compression, or another library's
        assert config.get("quant_method") == ("bitsandbytes" if name == "nf4" else None)
        return
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.ignore == ["lm_head", "model.layers.0.mlp.down_proj"]
    scheme = parsed.config_groups["group_0"]
    assert (scheme.targets, scheme.weights.symmetric, scheme.weights.dynamic) == (["Linear"], True, False)
    assert scheme.output_activations is parsed.kv_cache_scheme is None
    assert (scheme.input_activations is not None) == formats.get(name).quantizes_activations
    assert scheme.input_activations is None or (scheme.input_activations.dynamic and scheme.input_activations.symmetric)
