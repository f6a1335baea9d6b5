import json

import pytest

from lit_qrl.cli.parser import run as called
from lit_qrl.cli.quantize import _size, quantize
from lit_qrl.errors import ConfigError
from tests.tiny_run import model_folder


@pytest.fixture
def model(tmp_path):
    return model_folder(tmp_path / "model")


def options(model, output, **changed):
    given = {"model": model, "format": "nvfp4", "output": str(output), "device": "cpu", **changed}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def test_a_folder_is_made_and_named(model, tmp_path, capsys):
    report = quantize(model=model, format="nvfp4", output=tmp_path / "out", device="cpu", dtype="bf16")
    assert len(report.layers) == 14
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: 14 linear layers in nvfp4, 0." in printed
    assert printed.count(" MiB") == 2
    assert (_size(0.25 * 2**30), _size(3.5 * 2**30)) == ("0.25 GiB", "3.50 GiB")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"


def test_group_size_and_exclude_reach_the_format(model, tmp_path):
    given = options(model, tmp_path / "out", format="int4_group", group_size=32)
    called(quantize, [*given, "--exclude", "*.o_proj", "*.down_proj"])
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert len(quantization["ignore"]) == 5  # and lm_head


@pytest.mark.parametrize(
    "changed, match",
    [
        ({"format": "nvfp5"}, "no such number format.*nvfp4"),
        ({"format": "bf16"}, r"no weight-only format.*fp8_row.*nvfp4.*Given: bf16"),
        ({"format": "int4_group:activations=fp8"}, "activations=fp8"),
        ({"group_size": 32}, "no option 'group_size'"),
        ({"model_folder": "./nowhere"}, "model folder does not exist"),
        ({"shard_gib": 0}, "--shard_gib is too small"),
        ({"device": "cuda:99"}, "--device cuda:99 cannot be used"),
    ],
)
def test_options_that_cannot_work(changed, match, model, tmp_path):
    with pytest.raises(ConfigError, match=match):
        called(quantize, options(changed.pop("model_folder", model), tmp_path / "out", **changed))
    assert not (tmp_path / "out").exists()


def test_a_model_that_stands_alone_is_told_its_option():
    with pytest.raises(ConfigError, match=r"^The model comes after --model\. .* Write --model some/model\. See"):
        called(quantize, ["some/model", "--model", "m", "--format", "nvfp4", "--output", "o"])
