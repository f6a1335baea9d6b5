import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import QATAligned
from lit_qrl.precision.packed_base import check_plugin, multiplied_out, packed_format
from lit_qrl.precision.packed_lora import NVFP4LoRA, PackedLoRA
from lit_qrl.quantize import quantize_checkpoint
from tests.families.configs import BY_TYPE
from tests.families.configs import model_folder as family_folder
from tests.networks import batch_of
from tests.tables import csv_rows
from tests.tiny_run import build, model_folder

FORMATS = ("nvfp4", "mxfp4", "nf4", "int4_group:group_size=32", "fp8_row", "fp8_block", "fp8_tensor", "int8_channel")
BATCH = batch_of([[3, 4, 5], [6, 7]], [[8, 9, 10], [11, 12, 13, 14]])


def lora(**options):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})


def quantized(tmp_path, name="nvfp4", **options):
    format = formats.get(name)
    folder = tmp_path / name
    if not folder.exists():
        quantize_checkpoint(Path(model_folder(tmp_path / "model")), folder, format, **options)
    return str(folder), format


def configured(folder, format, plugin=None, **policy):
    torch.manual_seed(0)
    made = CausalPolicy(folder, **{"lora": lora(), **policy})
    made.configure()
    packer = plugin or NVFP4LoRA(format)
    packer.configure_policy(made)
    return made, packer


def same_base(from_codes, packer, on_load, other):
    """Whether a policy of a folder's codes and one that was packed on load hold the same ones; the layers' names."""
    layers, others = packer.packed(from_codes), other.packed(on_load)
    assert layers.keys() == others.keys()
    for layer, packed in layers.items():
        expected = others[layer].weight
        assert torch.equal(packed.weight.codes, expected.codes), layer
        assert torch.equal(packed.weight.scales.float(), expected.scales.float()), layer
    return list(layers)


@pytest.mark.parametrize("name", FORMATS)
def test_the_folder_gives_the_base_that_packing_on_load_gives(name, tmp_path):
    folder, format = quantized(tmp_path, name)
    from_codes, packer = configured(folder, format)
    on_load, other = configured(str(tmp_path / "model"), format)
    assert same_base(from_codes, packer, on_load, other)
    # A folder of NVFP4 or MXFP4 keeps its other tensors in bf16.
    plain = 0.05 if name in ("nvfp4", "mxfp4") else 0.0
    torch.testing.assert_close(
        from_codes(BATCH).logprobs, on_load(BATCH).logprobs, atol=plain, rtol=0, check_dtype=False
    )
    trained = [name for name, parameter in from_codes.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("kind", "name", "exclude", "count"),
    [
        ("gpt_neox", "int4_group", (), 8),  # whose names are those of the hub
        ("qwen3_moe", "nvfp4", (), 8 + 2 * 4 * 3),
        ("qwen3_moe", "nvfp4", ("*.experts",), 8),
        ("mixtral", "nvfp4", (), 8 + 2 * 4 * 3),
        ("mixtral", "nvfp4", ("*.experts",), 8),
        ("llama", "int4_group", ("*.down_proj",), 12),  # checkpoint names, under an adapter too
    ],
)
def test_so_does_a_folder_of_another_family(kind, name, exclude, count, tmp_path):
    format, plain = formats.get(name), family_folder(BY_TYPE[kind], tmp_path / "model")
    quantize_checkpoint(Path(plain), tmp_path / "out", format, exclude=exclude, dtype=torch.bfloat16)
    targets = {} if kind == "gpt_neox" else {"target_modules": ["q_proj", "v_proj"]}
    (from_codes, packer), (on_load, other) = (
        configured(str(folder), format, NVFP4LoRA(format, exclude=exclude), lora=lora(**targets), dtype="bf16")
        for folder in (tmp_path / "out", plain)
    )
    assert len(same_base(from_codes, packer, on_load, other)) == count
    assert torch.equal(from_codes(BATCH).logprobs, on_load(BATCH).logprobs)


def run(folder, epochs, resume=False, name="nvfp4"):
    format = formats.get(name)
    if not (folder / "model").exists():
        source = Path(model_folder(folder / "source"))
        quantize_checkpoint(source, folder / "model", format)  # where `build` looks for its model
    trainer, module, data = build(
        folder, policy={"lora": lora()}, format="auto", trainer={"max_epochs": epochs, "plugins": [NVFP4LoRA(format)]}
    )
    last = str(folder / "run" / "checkpoints" / "last.ckpt") if resume else None
    trainer.fit(module, datamodule=data, ckpt_path=last, weights_only=True if resume else None)
    return module


@pytest.mark.parametrize(("name", "apart"), [("nvfp4", 1e-5), ("fp8_row", 1e-3)])
def test_a_run_starts_from_the_folder_and_resumes(name, apart, tmp_path):
    """An input of FP8 whose last bits differ may become the next code, so learner and sampler differ by more there."""
    module = run(tmp_path / "a", 2, name=name)
    rows = csv_rows(tmp_path / "a" / "run" / "metrics.csv")
    assert len(rows) == 2
    assert max(float(row["mismatch/abs_log_ratio"]) for row in rows) < apart
    run(tmp_path / "b", 1, name=name)
    resumed = run(tmp_path / "b", 2, resume=True, name=name)
    for (name, one), (_, two) in zip(module.policy.named_parameters(), resumed.policy.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    assert not hasattr(module.policy.network.config, "quantization_config")


def test_what_no_base_is_held_in_is_not_taken_for_one():
    assert packed_format(formats.get("int4_group", activations="fp8").quantization_config()) is None
    fixed = formats.get("fp8_tensor").quantization_config()
    fixed["config_groups"]["group_0"]["input_activations"]["dynamic"] = False  # a scale of activations in the folder
    assert packed_format(fixed) is None
    alone = formats.get("fp8_row").quantization_config()
    alone["config_groups"]["group_0"]["input_activations"] = None  # FP8 weights under plain activations
    assert packed_format(alone) is None
    assert packed_format({"quant_method": "gptq", "bits": 4}) is None
    ordered = formats.get("int4_group").quantization_config()
    ordered["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    assert packed_format(ordered) is None


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("plugin", "name", "other"), [(NVFP4LoRA, "nvfp4", "mxfp4"), (PackedLoRA, "fp8_row", "int8_channel")]
)
def test_another_format_or_an_exclude_that_the_folder_does_not_share(plugin, name, other, tmp_path):
    folder, format = quantized(tmp_path, name)
    said = rf"holds its weights in {name}\. .*the same format in {plugin.__name__}: {name}\. Given: {other}\."
    with pytest.raises(ConfigError, match=said):
        configured(folder, format, plugin(other))
    with pytest.raises(ConfigError, match=rf"{plugin.__name__} leaves out .*down_proj"):
        configured(folder, format, plugin(name, exclude=["*.down_proj"]))
    policy = SimpleNamespace(source="folder", packed_format=format)
    said = rf"with {plugin.__name__}\(format={name}\).*Given: QATAligned\."
    with pytest.raises(ConfigError, match=said):
        check_plugin(QATAligned("fp8_row"), policy, torch.device("cpu"))


def test_how_inputs_are_scaled_is_the_plugin_s_to_say(tmp_path):
    folder, format = quantized(tmp_path, "fp8_tensor")
    by_token = formats.FP8Tensor("token")
    policy, packer = configured(folder, format, PackedLoRA(by_token))
    layers = packer.packed(policy)
    assert (
        {layer.format for layer in layers.values()} == {layer.weight.format for layer in layers.values()} == {by_token}
    )
    for name, layer in packer.packed(configured(folder, format)[0]).items():
        assert torch.equal(layers[name].weight.codes, layer.weight.codes)


def test_a_folder_of_another_architecture_is_named(tmp_path):
    folder, format = quantized(tmp_path)
    config_file = tmp_path / "nvfp4" / "config.json"
    config = json.loads(config_file.read_text())
    for field, value, match in (
        ("intermediate_size", 128, "is not one of Qwen3"),
        ("num_hidden_layers", 1, "has no linear layer model.layers.1"),
        ("num_hidden_layers", 3, "layers.2.* is missing"),
    ):
        changed = {**config, field: value}
        changed.pop("layer_types", None)
        config_file.write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=match):
            configured(folder, format)


def test_a_truncated_shard_is_named(tmp_path):
    folder, format = quantized(tmp_path)
    shard = tmp_path / "nvfp4" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing, truncated"):
        configured(folder, format)
    plain = tmp_path / "model" / "model.safetensors"
    plain.write_bytes(plain.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        CausalPolicy(str(tmp_path / "model")).configure()
    plain.unlink()
    torch.save({"lm_head.weight": tmp_path}, plain.with_name("pytorch_model.bin"))
    with pytest.raises(ConfigError, match="cannot be loaded: a file is damaged, or a pickle of more than tensors"):
        CausalPolicy(str(tmp_path / "model")).configure()


def test_codes_need_the_plugin_and_an_adapter_that_does_not_need_them(tmp_path):
    folder, _ = quantized(tmp_path)
    with pytest.raises(ConfigError, match=r"nvfp4_lora\.yaml"):
        check_plugin(None, CausalPolicy(folder), torch.device("cpu"))
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(ConfigError, match="starts from the base's weights"):
            CausalPolicy(folder, lora=lora(**options))
    config_file = tmp_path / "nvfp4" / "config.json"
    config = json.loads(config_file.read_text())
    config["quantization_config"] = formats.get("int4_group", activations="fp8").quantization_config()
    config_file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no adapter can be trained over"):
        CausalPolicy(folder, lora=lora())


def test_a_folder_that_lacks_an_expert_is_named(tmp_path):
    plain = Path(family_folder(BY_TYPE["qwen3_moe"], tmp_path / "model"))
    quantize_checkpoint(plain, tmp_path / "out", formats.get("nvfp4"))
    held = load_file(tmp_path / "out" / "model.safetensors")
    kept = {name: tensor for name, tensor in held.items() if ".0.mlp.experts.2.up_proj" not in name}
    save_file(kept, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers.0.mlp.experts|mlp.experts.*missing"):
        configured(str(tmp_path / "out"), formats.get("nvfp4"))


def test_experts_in_their_own_mxfp4_are_read_as_plain_weights(tmp_path):
    """gpt-oss's checkpoints: codes and exponents of "experts out in", in the shape of their blocks."""
    folder, format, plain = Path(family_folder(BY_TYPE["gpt_oss"], tmp_path / "model")), formats.get("mxfp4"), {}
    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        q = format.quantize_stack(held.pop(name).bfloat16().mT.contiguous())
        plain[name] = format.dequantize_stack(q, torch.bfloat16).mT
        held[f"{name}_blocks"] = q.codes.unflatten(-1, (-1, 16)).contiguous()
        held[f"{name}_scales"] = q.scales.contiguous()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    policy = CausalPolicy(str(folder), dtype="bf16")
    assert multiplied_out(policy.config)["quantization_config"].dequantize
    policy.configure()
    parameters = dict(policy.network.named_parameters())
    assert len(plain) == 4
    assert all(torch.equal(parameters[name], weight) for name, weight in plain.items())
    assert multiplied_out(policy.network.config) == {}


@pytest.mark.parametrize(
    ("scheme", "packing", "name"),
    [
        ("NVFP4A16", "nvfp4-pack-quantized", "nvfp4"),
        ("MXFP4A16", "mxfp4-pack-quantized", "mxfp4"),
        ("W4A16", "pack-quantized", "int4_group"),
        ("FP8_DYNAMIC", "float-quantized", "fp8_row"),
        ("W8A8", "int-quantized", "int8_channel"),
    ],
)
def test_what_llm_compressor_names_a_scheme_is_a_format_here(scheme, packing, name):
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    made = QuantizationConfig(config_groups={"group_0": preset_name_to_scheme(scheme, ["Linear"])}, ignore=["lm_head"])
    config = {**made.model_dump(mode="json"), "quant_method": "compressed-tensors", "format": packing}
    assert packed_format(config).name == name
