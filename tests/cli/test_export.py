import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_qrl import formats
from lit_qrl.cli.export import export
from lit_qrl.cli.main import main as lit_qrl
from lit_qrl.cli.parser import run as called
from lit_qrl.errors import ConfigError
from lit_qrl.network.folder import FolderReader, write_plain
from lit_qrl.policy import DTYPES
from lit_qrl.precision import PackedLoRA
from lit_qrl.quantize import quantize_checkpoint
from lit_qrl.run.checkpoint_files import take_parts, write_parts
from tests.families.configs import BY_TYPE
from tests.families.configs import model_folder as family_folder
from tests.tiny_run import command, configured, model_folder, without_plots
from tests.two_processes import one_process

LORA = [f"--model.policy.lora{part}" for part in ("=peft.LoraConfig", ".r=4", ".target_modules=all-linear")]
OPTIONS = {"packed": (), "packed_folder": ("--group_size", "32")}


def plugin(name, **options):
    return ["--trainer.plugins", json.dumps([{"class_path": name, "init_args": options}])]


def train(folder: Path, *args: str, base: Path | None = None) -> Path:
    """Return the run folder of one real iteration at a rate that moves every weight."""
    with without_plots():
        lit_qrl(command(folder, str(base or model_folder(folder / "model")), *args))
    return folder / "run"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return train(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return train(tmp_path_factory.mktemp("lora"), *LORA)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("packed"), *LORA, *plugin("NVFP4LoRA", format="nvfp4"))


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory):
    """Return a run over a quantized folder, in which the base has no plain weights."""
    folder = tmp_path_factory.mktemp("packed_folder")
    quantize_checkpoint(Path(model_folder(folder / "plain")), folder / "base", formats.get("int4_group", group_size=32))
    return train(folder, *LORA, *plugin("PackedLoRA", format="int4_group:group_size=32"), base=folder / "base")


def saved(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def test_a_fully_trained_policy_is_written_bit_for_bit(full, tmp_path, capsys):
    assert export(full, output=tmp_path / "out") == tmp_path / "out"
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = saved(full)
    start = AutoModelForCausalLM.from_pretrained(full.parent / "model")
    assert network.dtype == torch.float32
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, state[f"policy.model.{name}"])
        assert not torch.equal(parameter, start.get_parameter(name))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+2=")["input_ids"]


@pytest.mark.parametrize("options", [[], ["--format", "fp8_row"], ["--adapter"]])
def test_a_host_with_cuda_exports_the_same(options, lora, tmp_path, monkeypatch):
    called(export, [str(lora), "--output", str(tmp_path / "out"), *options])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    called(export, [str(lora), "--output", str(tmp_path / "again"), *options])
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_checkpoint_in_parts_is_written_as_one_in_a_file(full, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(full, run)
    whole = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    with one_process(tmp_path) as mesh:
        held = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole["state_dict"].items()}
        parts = {**whole, "state_dict": held, "optimizer_states": [], "parts": "parts-1"}
        write_parts(take_parts(parts), run / "checkpoints" / "parts-1")
    torch.save(parts, run / "checkpoints" / "last.ckpt")
    export(run, output=tmp_path / "out")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, saved(full)[f"policy.model.{name}"]) for name, p in network.named_parameters())
    shutil.rmtree(run / "checkpoints" / "parts-1")
    with pytest.raises(ConfigError, match="its parts are not beside it"):
        export(run, output=tmp_path / "again")


class KeepsMasters(Callback):
    """Keeps what the optimizer steps on, by name."""

    held: ClassVar[dict] = {}

    def on_train_end(self, trainer, pl_module):
        named = {name.removeprefix("policy.model."): one for name, one in pl_module.named_parameters()}
        self.held |= {name: trainer.optimizers[0].master(one).clone() for name, one in named.items()}


def test_fp32_of_weights_trained_in_16_bits_are_the_masters_bit_for_bit(tmp_path):
    options = ["--model.policy.dtype", "bf16", "--trainer.callbacks+", f"{__name__}.KeepsMasters"]
    run = train(tmp_path, *options, "--model.optimizer.lr", "1e-4")
    export(run, output=tmp_path / "masters", dtype="fp32")
    export(run, output=tmp_path / "own")
    masters, own = (load_file(tmp_path / name / "model.safetensors") for name in ("masters", "own"))
    assert masters.keys() == own.keys() <= KeepsMasters.held.keys()
    for name, tensor in masters.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, KeepsMasters.held[name])
        assert torch.equal(own[name], saved(run)[f"policy.model.{name}"])
    assert any(not torch.equal(masters[name], own[name].float()) for name in own)


def test_dtype_and_shards(full, tmp_path):
    checkpoint = full / "checkpoints" / "last.ckpt"
    called(export, [str(checkpoint), "--output", str(tmp_path / "out"), "--dtype", "bf16", "--shard_gib", "1e-5"])
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert network.dtype == torch.bfloat16
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(network.get_parameter(name), saved(full)[f"policy.model.{name}"].bfloat16())


@pytest.mark.parametrize("name", ["fp8_row", "int4_group"])
def test_a_quantized_export_holds_the_formats_own_codes(name, full, tmp_path):
    options = ["--group_size", "16"] if name == "int4_group" else []
    called(export, [str(full), "--output", str(tmp_path / "out"), "--format", name, *options])
    format = formats.get(name, **({"group_size": 16} if options else {}))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == format.quantization_config(["lm_head"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.1.self_attn.o_proj"
    weight = saved(full)[f"policy.model.{layer}.weight"]
    for key, tensor in format.export(format.quantize(weight), layer):
        assert torch.equal(tensors[key], tensor)


def test_an_adapter_is_merged(lora, tmp_path):
    called(export, [str(lora), "--output", str(tmp_path / "out")])
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state, layer = saved(lora), "model.layers.0.mlp.down_proj"
    prefix = f"policy.model.base_model.model.{layer}"
    a, b = (state[f"{prefix}.lora_{kind}.default.weight"].double() for kind in "AB")
    assert b.abs().max() > 0
    assert not [name for name in state if "lora_" not in name]  # the base is the model's own
    base = AutoModelForCausalLM.from_pretrained(lora.parent / "model").get_parameter(f"{layer}.weight")
    expected = base.double() + 8 / 4 * b @ a  # lora_alpha / r of PEFT's defaults
    torch.testing.assert_close(network.get_parameter(f"{layer}.weight").double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("which", ["lora", "packed"])
def test_an_adapter_alone_is_a_peft_folder(which, request, tmp_path):
    run = request.getfixturevalue(which)
    called(export, [str(run), "--output", str(tmp_path / "out"), "--adapter"])
    base = AutoModelForCausalLM.from_pretrained(run.parent / "model")
    loaded = PeftModel.from_pretrained(base, tmp_path / "out").state_dict()
    state = saved(run)
    factors = [name for name in state if "lora_" in name]
    assert len(factors) == 28
    for name in factors:
        assert torch.equal(loaded[name.removeprefix("policy.model.")], state[name])


def learner_of(run, model, plugin):
    """Return the network of a run's learner, made without what `export` restores."""
    policy = configured(model, lora=LoraConfig(r=4, target_modules="all-linear"))
    plugin.configure_policy(policy)
    state = {name.removeprefix("policy."): tensor for name, tensor in saved(run).items()}
    assert not policy.load_state_dict(state, strict=False).unexpected_keys
    return policy.network


@pytest.mark.parametrize(
    ("which", "model", "plugin", "dtype"),
    [
        ("packed", "model", PackedLoRA("nvfp4"), "bf16"),
        ("packed_folder", "base", PackedLoRA("int4_group:group_size=32"), "fp16"),
    ],
)
def test_an_adapter_is_merged_into_a_packed_base(which, model, plugin, dtype, request, tmp_path, capsys):
    run = request.getfixturevalue(which)
    tokens = torch.tensor([[2, 3, 4, 11, 5]])
    learner = learner_of(run, run.parent / model, plugin)
    expected = learner(tokens).logits.log_softmax(-1)
    export(run, output=tmp_path / "out")
    assert f"dequantized from {plugin.format}" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged(tokens).logits.log_softmax(-1), expected, rtol=0, atol=1e-5)
    export(run, output=tmp_path / "half", dtype=dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "model.safetensors").values()} == {DTYPES[dtype]}
    # and packed again: the format's codes of the sum
    layer, format = "model.layers.1.mlp.down_proj", plugin.format
    called(export, [str(run), "--output", str(tmp_path / "again"), "--format", str(format.name), *OPTIONS[which]])
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    codes = format.quantize(merged.get_parameter(f"{layer}.weight"))
    assert torch.equal(tensors[f"{layer}.weight_packed"].view(torch.uint8), codes.codes.view(torch.uint8))


def test_another_base_than_the_packed_one_is_refused(packed, tmp_path):
    shutil.copytree(packed.parent, tmp_path / "moved")
    model_folder(tmp_path / "other", seed=1)
    config = tmp_path / "moved" / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(packed.parent / "model"), str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="trained over another base"):
        export(tmp_path / "moved" / "run", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported(full, tmp_path):
    for words, message in (
        (["--adapter"], "has no adapter"),
        (["--checkpoint", "lst"], r"no checkpoint 'lst'.*Did you mean 'last'"),
        (["--format", "fp8_rows"], r"Did you mean 'fp8_row'"),
        (["--adapter", "--format", "fp8_row"], "as it was trained"),
        (["--output", str(full)], "exists already"),
    ):
        with pytest.raises(ConfigError, match=message):
            called(export, [str(full), "--output", str(tmp_path / "out"), *words])
    with pytest.raises(ConfigError, match=r"not a run folder.*Did you mean .*run"):
        called(export, [str(full.parent), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_format_that_libraries_multiply_out_in_bf16_has_everything_else_in_bf16(full, tmp_path):
    export(full, output=tmp_path / "out", format="nvfp4")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.1.self_attn.o_proj"
    weight = saved(full)[f"policy.model.{layer}.weight"]  # the codes are those of the fp32 weights
    assert torch.equal(tensors[f"{layer}.weight_packed"], formats.get("nvfp4").quantize(weight).codes)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert network(torch.tensor([[2, 3, 4]])).logits.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="bf16"):
        export(full, output=tmp_path / "other", format="nvfp4", dtype="fp32")


def test_a_run_in_low_precision_is_exported_as_it_computed(tmp_path, capsys):
    run = train(tmp_path, *plugin("QATAligned", weights="fp8_row", exclude=["*.down_proj"]))
    export(run, output=tmp_path / "out")
    assert "as the learner computed" in capsys.readouterr().out
    tensors, weights = load_file(tmp_path / "out" / "model.safetensors"), saved(run)
    layer = "model.layers.1.self_attn.o_proj"
    q = formats.get("fp8_row").quantize(weights[f"policy.model.{layer}.weight"])
    assert torch.equal(tensors[f"{layer}.weight"].view(torch.uint8), q.codes.view(torch.uint8))
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float32
    export(run, output=tmp_path / "masters", format="fp32")
    masters = load_file(tmp_path / "masters" / "model.safetensors")
    assert torch.equal(masters[f"{layer}.weight"], weights[f"policy.model.{layer}.weight"])


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_written_as_checkpoints_hold_them(kind, tmp_path):
    source = Path(family_folder(BY_TYPE[kind], tmp_path / "model"))
    policy = configured(source, dtype="fp32")
    (tmp_path / "out").mkdir()
    write_plain(policy, tmp_path / "out", None, 2**30)
    before, after = FolderReader(source), FolderReader(tmp_path / "out")
    assert {name: after.shapes[name] for name in before.names if "inv_freq" not in name} == after.shapes
    held = before.read(before.names)
    assert all(torch.equal(tensor, held[name]) for name, tensor in after.read(after.names).items())
    if kind != "gpt_oss":
        quantize_checkpoint(tmp_path / "out", tmp_path / "int4", formats.get("int4_group"))
        codes = [name for name in FolderReader(tmp_path / "int4").names if name.endswith("weight_packed")]
        assert sum(".experts." in name for name in codes) == 2 * 4 * 3
