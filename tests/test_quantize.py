import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.folder import INDEX, FolderReader, appearing
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.quantize import quantize_checkpoint
from tests.families.configs import BY_TYPE, model_folder
from tests.formats.int6_channel import Int6Channel
from tests.networks import build_network, build_tokenizer

FORMATS = {"nvfp4": {}, "mxfp4": {}, "nf4": {}, "int4_group": {"group_size": 32}}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
PROMPTS = torch.tensor([[3, 5, 7, 9, 11, 13, 15, 17]])


@pytest.fixture
def source(tmp_path):
    """A checkpoint whose shards part q from k and v."""
    folder = written(tmp_path / "source")
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    assert len({files[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"}) > 1
    return folder


def written(folder, dtype=torch.bfloat16, **changes):
    network = build_network(**{**SHAPE, **changes}).to(dtype)
    network.save_pretrained(folder, max_shard_size="15KB")
    build_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    assert (folder / INDEX).exists()
    return folder


# The libraries multiply FP4 codes out into bf16 whatever is asked for.
def loaded(folder, dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logprobs(network):
    return network(PROMPTS).logits.float().log_softmax(dim=-1)


def in_format(source, format, exclude=(), dtype=torch.bfloat16):
    """The plain model with every weight rounded in a loop of its own."""
    network, plain = loaded(source, dtype), loaded(source, dtype)
    for name, linear in quantizable_linears(network, exclude).items():
        parent, leaf = name.rsplit(".", 1)
        groups = (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"])
        members = next((group for group in groups if leaf in group), [leaf])
        amax = torch.stack([plain.get_parameter(f"{parent}.{m}.weight").detach().abs().amax() for m in members]).amax()
        q = format.quantize(linear.weight.detach(), amax if format.shares_amax else None)
        linear.weight.data = format.dequantize(q, dtype)
    return network


def test_transformers_reads_the_weights_of_mxfp8(source, tmp_path):
    format = formats.get("mxfp8")
    quantize_checkpoint(source, tmp_path / "out", format, dtype=torch.bfloat16)
    read = loaded(tmp_path / "out")
    logprobs(read)  # the first forward pass multiplies the codes out
    for name, linear in quantizable_linears(loaded(source), ()).items():
        expected = format.dequantize(format.quantize(linear.weight.detach()), torch.bfloat16)
        assert torch.equal(read.get_parameter(f"{name}.weight"), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_reads_the_output_as_the_format_computes_it(name, source, tmp_path):
    format = formats.get(name, **FORMATS[name])
    report = quantize_checkpoint(source, tmp_path / "out", format, dtype=torch.bfloat16, shard_bytes=20_000)
    assert len(report.layers) == 14
    assert (tmp_path / "out" / INDEX).exists()
    expected = logprobs(in_format(source, format))
    # bitsandbytes multiplies with a kernel of its own; its output is rounded to bf16 too
    got = logprobs(loaded(tmp_path / "out"))
    torch.testing.assert_close(got, expected, rtol=0, atol=0.03 if name == "nf4" else 0)
    assert (logprobs(loaded(source)) - expected).abs().max() > 0.05


@pytest.mark.parametrize(
    "model_type, other", [("gpt_neox", "embed_out.weight"), ("gemma3", "language_model.model.norm.weight")]
)
def test_names_of_a_checkpoint_that_are_not_the_models_own(model_type, other, tmp_path):
    """transformers saves some tensors under the names that the hub has, and reads them back by its own mapping."""
    source, format = tmp_path / "source", formats.get("int4_group")
    model_folder(BY_TYPE[model_type], source)
    report = quantize_checkpoint(source, tmp_path / "out", format)
    before, after = FolderReader(source), FolderReader(tmp_path / "out")
    assert other in before.names
    assert torch.equal(before.read([other])[other], after.read([other])[other])
    plain = {name for name in before.names if f"{name}_packed" not in after.names}
    assert len(before.names) - len(plain) == len(report.layers) > 0
    assert plain <= set(after.names)
    ours, theirs = in_format(source, format, dtype=torch.float32), loaded(tmp_path / "out", torch.float32)
    assert torch.equal(logprobs(theirs), logprobs(ours))
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {name for name in ignored if "lm_head" in name or "embed_out" in name} >= (
        {"lm_head", "embed_out"} if model_type == "gpt_neox" else {"lm_head"}
    )


@torch.no_grad()
def experts_in_format(source, format):
    """As `in_format`, with each expert's matrices rounded: gate and up of one have a largest number in common."""
    network = in_format(source, format, dtype=torch.float32)
    for module in network.modules():
        for parameter in (p for p in module._parameters.values() if p is not None and p.ndim == 3):
            for one in parameter:  # gate above up, "out in"
                q = format.quantize(one, one.abs().amax() if format.shares_amax else None)
                one.copy_(format.dequantize(q, torch.float32))
    return network


@pytest.mark.parametrize("name", ["int4_group", "fp8_row"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_transformers_reads_experts_as_the_format_computes_them(kind, name, tmp_path):
    source, format = Path(model_folder(BY_TYPE[kind], tmp_path / "model")), formats.get(name)
    report = quantize_checkpoint(source, tmp_path / "out", format)
    before, after = FolderReader(source), FolderReader(tmp_path / "out")
    packed = [name.removesuffix("_scale") for name in after.names if name.endswith("_scale")]
    assert set(packed) <= set(before.names)  # experts are called as the checkpoint calls them
    assert len(packed) == len(report.layers)
    assert any(".experts.3." in layer for layer in report.layers)
    got, expected = loaded(tmp_path / "out", torch.float32), experts_in_format(source, format)
    if name == "fp8_row":  # it multiplies the codes out into bf16, and rounds what other layers read
        stacks = {key: parameter for key, parameter in expected.named_parameters() if parameter.ndim == 3}
        assert stacks
        for key, parameter in stacks.items():
            torch.testing.assert_close(got.get_parameter(key).float(), parameter, rtol=2**-8, atol=0)
        return
    torch.testing.assert_close(logprobs(got), logprobs(expected), rtol=0, atol=1e-5)
    assert (logprobs(loaded(source, torch.float32)) - logprobs(expected)).abs().max() > 0.05


def test_routers_and_experts_that_are_left_out_are_listed_for_engines(tmp_path):
    source, format = Path(model_folder(BY_TYPE["mixtral"], tmp_path / "model")), formats.get("int4_group")
    quantize_checkpoint(source, tmp_path / "out", format, exclude=["*.experts"])
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    found = [pattern.removeprefix("re:") for pattern in ignored if pattern.startswith("re:")]
    for name in ("model.layers.1.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.experts.3.w1"):
        assert any(re.fullmatch(pattern, name) for pattern in found)
    assert not any(re.fullmatch(pattern, "model.layers.1.self_attn.q_proj") for pattern in found)
    before, after = FolderReader(source), FolderReader(tmp_path / "out")
    plain = [name for name in before.names if ".experts." in name]
    assert torch.equal(after.read(plain[:1])[plain[0]], before.read(plain[:1])[plain[0]])


def test_a_format_that_transformers_misreads_for_experts_is_warned_of(tmp_path, caplog):
    source = Path(model_folder(BY_TYPE["qwen3_moe"], tmp_path / "model"))
    quantize_checkpoint(source, tmp_path / "out", formats.get("nvfp4"))
    assert "transformers does not read experts in nvfp4" in caplog.text
    caplog.clear()
    quantize_checkpoint(source, tmp_path / "int4", formats.get("int4_group"))
    assert "transformers does not read" not in caplog.text


def test_layers_that_are_left_out_stay_bit_for_bit(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", formats.get("nvfp4"), exclude=["*.down_proj"])
    before, after = FolderReader(source), FolderReader(tmp_path / "out")
    kept = [name for name in before.names if name in after.shapes]
    assert sum("down_proj" in name for name in kept) == 2
    for name in kept:
        assert torch.equal(before.read([name])[name], after.read([name])[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model.layers.0.mlp.down_proj" in config["quantization_config"]["ignore"]
    expected = logprobs(in_format(source, formats.get("nvfp4"), ["*.down_proj"]))
    assert torch.equal(logprobs(loaded(tmp_path / "out")), expected)


def test_the_output_is_a_whole_folder(source, tmp_path):
    steps = []
    quantize_checkpoint(
        source, tmp_path / "out", formats.get("mxfp4"), dtype=torch.bfloat16, progress=lambda *at: steps.append(at)
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert steps == [(0, 2), (1, 2), (2, 2)]
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert loaded(tmp_path / "out", torch.bfloat16).get_input_embeddings().weight.dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------------- bad input


def failing(match, *arguments, **options):
    with pytest.raises(ConfigError, match=match):
        quantize_checkpoint(*arguments, **options)


def nothing_left(tmp_path, before):
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_truncated_or_missing_shard_is_named(source, tmp_path):
    shard = sorted(source.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    before = sorted(path.name for path in tmp_path.iterdir())
    for size in (len(whole) // 2, 4, 0):
        shard.write_bytes(whole[:size])
        failing(f"{shard.name} is missing, truncated", source, tmp_path / "out", formats.get("nvfp4"))
    shard.unlink()
    failing(f"{shard.name} is missing", source, tmp_path / "out", formats.get("nvfp4"))
    nothing_left(tmp_path, before)


def test_an_index_that_names_no_shards(source, tmp_path):
    (source / INDEX).write_text("{}")
    failing("is no index", source, tmp_path / "out", formats.get("nvfp4"))


@pytest.mark.parametrize(
    "field, value", [("model_type", "llama"), ("num_hidden_layers", 3), ("intermediate_size", 160)]
)
def test_weights_of_another_architecture_are_refused(field, value, source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    config[field] = value
    if field == "model_type":
        config["architectures"] = ["LlamaForCausalLM"]
    config.pop("layer_types", None)
    (source / "config.json").write_text(json.dumps(config))
    failing("is not a checkpoint of", source, tmp_path / "out", formats.get("nvfp4"))


def test_a_config_that_is_no_causal_language_model(source, tmp_path):
    (source / "config.json").write_text('{"model_type": "nonsense"}')
    failing("no causal language model", source, tmp_path / "out", formats.get("nvfp4"))
    (source / "config.json").write_text("{")
    failing("config.json cannot be read", source, tmp_path / "out", formats.get("nvfp4"))


def test_shapes_excludes_and_values_that_do_not_fit(source, tmp_path):
    failing("layers.0.self_attn.q_proj", source, tmp_path / "out", formats.get("int4_group", group_size=128))
    failing("splits layers", source, tmp_path / "out", formats.get("nvfp4"), exclude=["*.q_proj"])
    failing("No linear layer is left", source, tmp_path / "out", formats.get("nvfp4"), exclude=["*"])
    shard = source / json.loads((source / INDEX).read_text())["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    tensors = load_file(shard)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    before = sorted(path.name for path in tmp_path.iterdir())
    failing("layers.1.mlp.up_proj", source, tmp_path / "out", formats.get("nvfp4"))
    nothing_left(tmp_path, before)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("gpt_oss", "int4_group", r"in one piece.*layers.0.mlp.experts.*--exclude '\*.experts'"),
        ("qwen3_moe", "nf4", r"No library reads experts in nf4.*int4_group.*Given: model.layers.0"),
        ("qwen3_moe", "int6_channel", r"No library reads experts in int6_channel"),
    ],
)
def test_experts_that_no_library_would_read_are_not_written(tmp_path, kind, name, said, format_rows):
    formats.register(Int6Channel)
    source = Path(model_folder(BY_TYPE[kind], tmp_path / "model"))
    failing(said, source, tmp_path / "out", formats.get(name))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_quantized_already(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "once", formats.get("nvfp4"))
    failing("quantized already", tmp_path / "once", tmp_path / "twice", formats.get("nvfp4"))


def test_outputs_that_exist_or_cannot_be_written(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    failing("exists already", source, tmp_path / "full", formats.get("nvfp4"))
    (tmp_path / "file").write_text("")
    failing("exists already", source, tmp_path / "file", formats.get("nvfp4"))
    failing("cannot be written", source, tmp_path / "file" / "inside", formats.get("nvfp4"))
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"
    with pytest.raises(ConfigError, match="no room"), appearing(tmp_path / "out", needed_bytes=1 << 60):
        pass


def test_an_interrupt_leaves_nothing(source, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())

    def interrupt(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "out", formats.get("nvfp4"), shard_bytes=1000, progress=interrupt)
    nothing_left(tmp_path, before)


def test_a_killed_process_leaves_nothing_that_loads(source, tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from lit_qrl import formats
from lit_qrl.quantize import quantize_checkpoint
def progress(done, total):
    if done == 2:
        print("now", flush=True)
        time.sleep(60)
quantize_checkpoint(Path({str(source)!r}), Path({str(tmp_path / "out")!r}), formats.get("nvfp4"), shard_bytes=1000,
                    progress=progress)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "now"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    (left,) = [path for path in tmp_path.iterdir() if "partial" in path.name]
    assert any(left.iterdir())
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(left)
