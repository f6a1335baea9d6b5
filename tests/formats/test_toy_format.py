"""A new number format is one file and one row: `int6_channel.py` works everywhere, and nothing else knows of it."""

import json
from itertools import takewhile

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lit_qrl import formats
from lit_qrl.callbacks import RLCallback
from lit_qrl.cli.audit import audit
from lit_qrl.cli.export import export
from lit_qrl.cli.parser import run
from lit_qrl.cli.quantize import quantize
from lit_qrl.errors import ConfigError
from lit_qrl.formats import support
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.precision import QATAligned
from tests.formats.int6_channel import ROW, Int6Channel
from tests.networks import build_network
from tests.tiny_run import fit, model_folder

LAYERS = 14  # two decoder layers of seven


@pytest.fixture(autouse=True)
def registered(format_rows):
    formats.register(Int6Channel, ROW)


def loop64(weight):
    """The numbers that the weight becomes, in Python; the quotient is rounded to fp32 as the format says."""
    rows = []
    for row in weight.tolist():
        scale = float(torch.tensor(max(map(abs, row))) / 31.5)
        quotients = (torch.tensor(row) / scale).tolist()
        rows.append([round(min(max(one, -32.0), 31.0)) * scale for one in quotients])
    return torch.tensor(rows, dtype=torch.float64)


def rendered(network):
    """Weights of the linear layers of a plain network as the sampler computes with them."""
    return {name: loop64(layer.weight.detach()).float() for name, layer in quantizable_linears(network).items()}


def test_the_format_is_what_it_says():
    weight = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    format = formats.get("int6_channel")
    q = format.quantize(weight)
    assert q.codes.shape == (8, 9)
    assert torch.allclose(format.dequantize(q).double(), loop64(weight), rtol=1e-6, atol=0)
    with pytest.raises(ConfigError, match=r"int6_channel.*divisible by 4"):
        format.quantize(torch.randn(2, 6))


class Sampler(RLCallback):
    def on_rollout_end(self, trainer, module, batch):
        network = module.data.engine.network
        self.layers = [part for part in network.modules() if isinstance(part, QuantizedLinear)]
        expected = loop64(module.policy.network.get_submodule("model.layers.0.mlp.up_proj").weight.detach())
        x = torch.randn(3, expected.shape[1])
        assert torch.allclose(network.model.layers[0].mlp.up_proj(x), x @ expected.float().t(), atol=1e-5)


def test_a_run_publishes_loads_and_generates_in_it(tmp_path):
    sampler = Sampler()
    trainer, _, _ = fit(tmp_path, callbacks=[sampler], format="int6_channel", trainer={"max_epochs": 2})
    assert len(sampler.layers) == LAYERS
    assert all(layer.format == Int6Channel() for layer in sampler.layers)
    published = json.loads((tmp_path / "run" / "publish.json").read_text())["layers"]
    assert list(published.values()).count("int6_channel") == LAYERS
    assert 0 < float(trainer.logged_metrics["mismatch/abs_log_ratio"]) < 0.5


def test_a_learner_can_be_aligned_with_it(tmp_path):
    trainer, _, _ = fit(
        tmp_path, format="auto", trainer={"max_epochs": 1, "plugins": [QATAligned("int6_channel")], "precision": None}
    )
    assert float(trainer.logged_metrics["mismatch/abs_log_ratio"]) < 1e-5


def test_audit_measures_it_unless_told_otherwise(tmp_path, capsys, format_rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(4)))
    model, prompts = model_folder(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    arguments = ["--model", model, "--prompts", prompts, "--chat", "false", "--max_tokens", "8", "--device", "cpu"]
    run(audit, [*arguments, "--formats", "int6_channel", "nvfp4", "--out", str(tmp_path / "a.json")])
    figures = json.loads((tmp_path / "a.json").read_text())["formats"]
    parameters = dict(build_network(hidden_size=64, intermediate_size=64, head_dim=16).named_parameters())
    numbers = {name: parameter.numel() for name, parameter in parameters.items()}
    quantized = sum(count for name, count in numbers.items() if name.endswith("_proj.weight"))
    # Rows of 64 codes share a scale in fp32; what is not quantized is the learner's, in fp32 on a CPU.
    bits = (6 + 32 / 64) * quantized + 32 * (sum(numbers.values()) - quantized)
    assert figures["int6_channel"]["bits"] == pytest.approx(bits / sum(numbers.values()))
    distances = [figures[name]["abs_log_ratio"] for name in ("learner", "int6_channel", "nvfp4")]
    assert distances == sorted(distances)
    assert distances[1] > 1e-3
    for name in formats.names():  # all but itself, so that the default is quickly measured
        format_rows(name, audited=name == "int6_channel")
    capsys.readouterr()
    run(audit, arguments)
    rows = takewhile(str.strip, capsys.readouterr().out.splitlines()[3:])  # what it makes of them comes behind
    assert [row.split()[0] for row in rows] == ["learner", "int6_channel"]


def test_quantize_writes_it(tmp_path):
    model = model_folder(tmp_path / "model")
    run(quantize, ["--model", model, "--format", "int6_channel", "--output", str(tmp_path / "out"), "--device", "cpu"])
    check_folder(tmp_path / "out", AutoModelForCausalLM.from_pretrained(model))


def test_export_writes_it(tmp_path):
    _, module, _ = fit(tmp_path, trainer={"max_epochs": 1})
    policy = {"class_path": "lit_qrl.policy.CausalPolicy", "init_args": {"model": str(tmp_path / "model")}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": policy}}))
    run(export, [str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--format", "int6_channel"])
    check_folder(tmp_path / "out", module.policy.network)


def check_folder(folder, network):
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["weights"]["num_bits"] == 6
    for name, expected in rendered(network).items():
        parts = {suffix: tensors.pop(f"{name}.{suffix}") for suffix in ("weight_packed", "weight_scale")}
        got = Int6Channel().dequantize(Int6Channel().load(parts, tuple(expected.shape)))
        assert torch.allclose(got, expected, rtol=1e-6, atol=0)
    plain = dict(network.named_parameters())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in tensors.items())


def test_its_name_is_its_own():
    class Other(Int6Channel):
        pass

    with pytest.raises(ConfigError, match=r"there already.*Int6Channel and Other"):
        formats.register(Other)
    formats.register(Int6Channel)  # once more: the row stays
    assert support.row_of(Int6Channel()) is ROW
