import pytest
from compressed_tensors.quantization import QuantizationConfig

from lit_qrl.formats.configs import compressed_tensors_config

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def test_the_library_reads_what_was_meant():
    made = compressed_tensors_config("pack-quantized", weights=WEIGHTS, ignore=("lm_head", "model.layers.0.mlp.gate"))
    config = QuantizationConfig.model_validate(made)
    assert (config.format, config.ignore) == ("pack-quantized", ["lm_head", "model.layers.0.mlp.gate"])
    (scheme,) = config.config_groups.values()
    assert scheme.targets == ["Linear"]
    weights = scheme.weights
    assert (weights.num_bits, weights.group_size, weights.symmetric, weights.dynamic) == (4, 32, True, False)
    assert scheme.input_activations is scheme.output_activations is config.kv_cache_scheme is None


def test_activations_are_dynamic_and_symmetric_unless_said_otherwise():
    activations = {"num_bits": 8, "type": "float", "strategy": "token"}
    made = compressed_tensors_config("float-quantized", weights=WEIGHTS, activations=activations)
    (scheme,) = QuantizationConfig.model_validate(made).config_groups.values()
    assert scheme.input_activations.dynamic is True
    assert scheme.input_activations.symmetric is True
    made = compressed_tensors_config("x", weights=WEIGHTS, activations={**activations, "dynamic": False})
    assert made["config_groups"]["group_0"]["input_activations"]["dynamic"] is False


@pytest.mark.parametrize("ignore", [("lm_head",), ["a", "b"]])
def test_nothing_is_shared_between_calls(ignore):
    first = compressed_tensors_config("x", weights=WEIGHTS, ignore=ignore)
    first["ignore"].append("c")
    first["config_groups"]["group_0"]["weights"]["num_bits"] = 2
    again = compressed_tensors_config("x", weights=WEIGHTS, ignore=ignore)
    assert again["ignore"] == list(ignore)
    assert again["config_groups"]["group_0"]["weights"]["num_bits"] == WEIGHTS["num_bits"] == 4
