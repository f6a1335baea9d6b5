import json
import os
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from lit_qrl.errors import ConfigError
from lit_qrl.network.folder import (
    INDEX,
    FolderReader,
    FolderWriter,
    appearing,
    copy_side_files,
    local_folder,
    read_config,
    refuse_existing,
    resolve_model,
)
from lit_qrl.policy import CausalPolicy
from tests.networks import SIZES, build_network

TENSORS = {f"layer.{i}": torch.arange(8.0 * (i + 1)).view(-1, 8) for i in range(5)}


def write(folder, shard_bytes):
    folder.mkdir(exist_ok=True)
    writer = FolderWriter(folder, shard_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.close()
    return folder


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**6, 1), (200, 3), (1, 5)])
def test_what_is_written_is_read_by_the_library_and_here(shard_bytes, files, tmp_path):
    folder = write(tmp_path / "out", shard_bytes)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == files
    merged = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    read = FolderReader(folder)
    assert set(read.names) == set(merged) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(merged[name], tensor)
        assert torch.equal(read.read([name])[name], tensor)
        assert (read.shapes[name], read.dtype(name)) == (tuple(tensor.shape), torch.float32)
    assert read.bytes == sum(shard.stat().st_size for shard in shards)
    if files > 1:
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in TENSORS.values())
        assert set(index["weight_map"]) == set(TENSORS)
    assert not list(folder.glob("*.partial"))


def test_a_tensor_may_change_after_it_was_taken(tmp_path):
    writer, tensor = FolderWriter(tmp_path, 10**6), torch.ones(4)
    writer.add("a", tensor)
    tensor.zero_()
    writer.close()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.ones(4))


def test_codes_have_no_floating_dtype(tmp_path):
    save_file(
        {"codes": torch.ones(2, dtype=torch.uint8), "w": torch.ones(2).bfloat16()}, tmp_path / "model.safetensors"
    )
    read = FolderReader(tmp_path)
    assert (read.dtype("codes"), read.dtype("w")) == (None, torch.bfloat16)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_who_may_read_a_folder_is_the_user_s_to_say(tmp_path, mask):
    before = os.umask(mask)
    try:
        with appearing(tmp_path / "out") as partial:
            writer = FolderWriter(partial, 1 << 20)
            writer.add("a", torch.ones(2))
            writer.close()
    finally:
        os.umask(before)
    (written,) = (tmp_path / "out").iterdir()
    assert [(tmp_path / "out").stat().st_mode & 0o777, written.stat().st_mode & 0o777] == [0o777 & ~mask, 0o666 & ~mask]


def test_an_output_that_holds_something_is_refused(tmp_path):
    refuse_existing(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    refuse_existing(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="exists already"):
            refuse_existing(path)


def test_side_files_are_all_but_weights_index_and_config(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name in ("config.json", INDEX, "model.safetensors", "tokenizer.json", "chat_template.jinja", "notes.md"):
        (source / name).write_text(name)
    copy_side_files(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["chat_template.jinja", "tokenizer.json"]


def test_folders_and_configs_that_are_not_there(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="does not exist"):
        local_folder("./nothing")
    with pytest.raises(ConfigError, match="no weights"):
        FolderReader(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"a JSON object\. Given: list"):
        read_config(tmp_path)


def test_a_name_under_a_folder_that_is_here_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("good", "fine", ".hidden"):
        (tmp_path / "mine" / name).mkdir(parents=True)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.append(name) or str(tmp_path)
    )
    for name, words in (
        ("mine/goo", r"Given: mine/goo\. mine holds good, fine\. .* folder without 'mine'"),
        ("./other", r"Given: \./other\. \. holds mine\.$"),
        ("a/b/c", r"Given: a/b/c\. Correct the path\.$"),
    ):
        with pytest.raises(ConfigError, match=words):
            local_folder(name)
        with pytest.raises(ConfigError, match=words):
            resolve_model(name, weights=True)
    assert asked == []
    assert local_folder("org/name") == tmp_path
    assert (asked, resolve_model("org/name", weights=True)) == (["org/name"], "org/name")
    assert resolve_model("gpt2", weights=True) == "gpt2"


def test_a_folder_that_ships_is_one_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = resolve_model("models/tiny-countdown", weights=True)
    assert {"config.json", "model.safetensors"} <= set(os.listdir(found))
    assert str(local_folder("models/tiny-countdown")) == found
    with pytest.raises(ConfigError, match="models holds tiny-countdown"):
        resolve_model("models/nothing", weights=True)


def test_a_repository_that_cannot_be_fetched_names_the_way_around(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fail(name, **options):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"'org/name' cannot be fetched.*OSError: no route.*hf download NAME"):
        local_folder("org/name")


def test_tensors_are_known_by_other_names_once_they_are_told(tmp_path):
    save_file({"old.weight": torch.arange(6.0).view(2, 3), "same": torch.zeros(1)}, tmp_path / "model.safetensors")
    reader = FolderReader(tmp_path)
    reader.rename({"new.weight": "old.weight", "same": "same"})
    assert reader.names == ["new.weight", "same"]
    assert reader.shapes["new.weight"] == (2, 3)
    assert reader.stored("new.weight") == "old.weight"
    assert torch.equal(reader.read(["new.weight"])["new.weight"], torch.arange(6.0).view(2, 3))


# ---------------------------------------------------------------------------------------------------------------- GGUF

VOCABULARY = ["<pad>", "<eos>", "<turn>", *"abcdefghijklmnopqrst", "ab", "cd"]
TEMPLATE = "{% for m in messages %}{{ m.content }}<turn>{% endfor %}"
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture
def write_gguf(tmp_path, monkeypatch):
    """Write a network with matrices of Q8_0, and return the file and a network of the same numbers."""
    gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))

    def write(head=None, kind="Q8_0"):
        sizes = {"intermediate_size": 64, "vocab_size": len(VOCABULARY), "rope_theta": 10000.0}
        network = build_network(Qwen2Config, **sizes, bias=0.1)
        file = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(file, "qwen2")
        writer.add_block_count(SIZES["num_hidden_layers"])
        writer.add_context_length(64)
        writer.add_embedding_length(SIZES["hidden_size"])
        writer.add_feed_forward_length(64)
        writer.add_head_count(SIZES["num_attention_heads"])
        writer.add_head_count_kv(SIZES["num_key_value_heads"])
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(network.config.rms_norm_eps)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(VOCABULARY)
        writer.add_token_types([3, 3, 3, *[1] * (len(VOCABULARY) - 3)])
        writer.add_token_merges(["a b", "c d"])
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_chat_template(TEMPLATE)
        known = gguf.GGMLQuantizationType
        for name, tensor in network.state_dict().items():
            if name == "lm_head.weight":
                continue
            part, _, suffix = name.rpartition(".")
            whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}.get(part)
            block, _, inner = part.removeprefix("model.layers.").partition(".")
            whole = whole or f"blk.{block}.{GGUF_NAMES[inner]}"
            held = known.F32
            numbers = tensor.numpy()
            if tensor.ndim == 2:
                held = known.Q4_0 if head and whole == "token_embd" else known.Q8_0
                numbers = gguf.quantize(numbers, held)
                exact = gguf.dequantize(gguf.quantize(tensor.numpy(), known.Q8_0), known.Q8_0)
                tensor.copy_(torch.from_numpy(exact))
            writer.add_tensor(f"{whole}.{suffix}", numbers, raw_dtype=held)
            if head and whole == "token_embd":
                writer.add_tensor("output.weight", gguf.quantize(tensor.numpy(), known.Q8_0), raw_dtype=known.Q8_0)
        if kind == "Q8_K":
            writer.add_tensor("blk.0.odd.weight", np.zeros((1, 292), np.uint8), raw_dtype=known.Q8_K)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file, network

    return write


@pytest.mark.parametrize("head", [None, "twice"])
def test_a_gguf_file_is_the_model_of_its_numbers(head, write_gguf):
    file, network = write_gguf(head)
    policy = CausalPolicy(str(file))
    policy.configure()
    tokens = torch.tensor([[4, 5, 9, 3]])
    assert torch.equal(policy.network(tokens).logits, network(tokens).logits)
    assert policy.network.lm_head.weight is policy.network.model.embed_tokens.weight
    assert (policy.tokenizer.eos_token, policy.stop_token_ids, policy.pad_token_id) == ("<turn>", (2,), 0)
    assert policy.encode([{"role": "user", "content": "abc"}]) == [
        VOCABULARY.index(word) for word in ("ab", "c", "<turn>")
    ]
    assert policy.config.dtype == torch.bfloat16  # as it was before it was quantized, for `auto` on a GPU
    made = local_folder(str(file))
    before = made.stat().st_mtime_ns
    assert (CausalPolicy(str(file)).source, made.stat().st_mtime_ns) == (str(made), before)


def test_what_is_no_gguf_file_that_can_be_read(write_gguf, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"cannot be read.*Q8_K"):
        CausalPolicy(str(write_gguf(kind="Q8_K")[0]))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUFnone")
    with pytest.raises(ConfigError, match="cannot be read"):
        CausalPolicy(str(tmp_path / "damaged.gguf"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"lit-qrl\[gguf\]"):
        CausalPolicy(str(tmp_path / "damaged.gguf"))
    assert not list((tmp_path / "cache" / "lit_qrl").glob("*/"))
