import json

import pytest
import torch
from transformers import AutoConfig

from lit_qrl import formats
from lit_qrl.rollout.vllm.folder import model_folder, remove
from tests.families.configs import BY_TYPE, random_network
from tests.families.vllm_cells import of_the_table
from tests.forked import run_each
from tests.networks import build_network


def written(network, format=None, head=False, longest=32):
    """What the folder of a network in fp32 says."""
    folder = model_folder(network, format, (), head, torch.float32, longest)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", [None, "bf16", "fp8_row", "int4_group"])
def test_the_folder_is_a_config_that_transformers_reads_and_no_weights(name):
    network, format = build_network(), None if name is None else formats.get(name)
    folder = model_folder(network, format, ["*.down_proj"], False, torch.bfloat16, longest=32)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    said = json.loads((folder / "config.json").read_text())
    assert said["architectures"] == ["Qwen3ForCausalLM"]
    read = AutoConfig.from_pretrained(folder)
    assert read.hidden_size == network.config.hidden_size
    assert read.dtype == torch.bfloat16
    if name in (None, "bf16"):
        assert "quantization_config" not in said
    else:
        left_out = {f"model.layers.{i}.mlp.down_proj" for i in range(2)} | {"lm_head"}
        assert set(said["quantization_config"]["ignore"]) == left_out
        assert said["quantization_config"]["config_groups"]["group_0"]["targets"] == ["Linear"]


def test_a_router_that_adds_a_bias_is_said_to_do_so():
    for kind, expected in (("deepseek_v3", "noaux_tc sigmoid"), ("qwen3_moe", "None None")):
        said = written(random_network(BY_TYPE[kind]))
        assert f"{said.get('topk_method')} {said.get('scoring_func')}" == expected


@pytest.mark.vllm
@pytest.mark.parametrize(("kind", "wider"), [("cohere2", 1), ("mistral", 0)])
def test_a_window_is_as_wide_as_transformers_takes_it(kind, wider):
    network = random_network(BY_TYPE[kind])
    assert written(network)["sliding_window"] == network.config.sliding_window - (wider if of_the_table((0, 29)) else 0)


def test_a_quantized_head_is_a_target_of_its_own():
    said = written(build_network(tie_word_embeddings=False), formats.get("fp8_row"), head=True)["quantization_config"]
    assert said["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    assert said["ignore"] == []


@pytest.mark.parametrize(("longest", "expected"), [(32, 64), (64, 64), (200, 200)])
def test_positions_reach_for_the_longest_sequence_and_are_never_cut(longest, expected):
    network = build_network(max_position_embeddings=64)
    assert written(network, longest=longest)["max_position_embeddings"] == expected


def test_what_the_learner_s_own_folder_was_quantized_to_is_not_passed_on():
    network = build_network()
    network.config.quantization_config = {"quant_method": "compressed-tensors"}
    assert "quantization_config" not in written(network)


IMPORTS = """
import os, sys
import torch
from lit_qrl.rollout.vllm.folder import model_folder, remove
from tests.networks import build_network
"""
MADE = """
folders = [model_folder(build_network(), None, (), False, torch.float32, 32) for _ in range(3)]
remove(folders[0])
print(*[folder.is_dir() for folder in folders], flush=True)
if os.fork() == 0:
    sys.exit()  # runs what a process runs at its end
os.wait()
print(*[folder.is_dir() for folder in folders], flush=True)
"""


def test_folders_that_nobody_removed_go_with_the_process_that_made_them(tmp_path):
    programs = [MADE + ending for ending in ("", "raise RuntimeError", "sys.exit(3)")]
    made, said = tmp_path / "made", tmp_path / "said"
    made.mkdir()
    said.mkdir()
    ended = run_each(IMPORTS, programs, said, TMPDIR=str(made))
    assert [one.stdout.splitlines() for one in ended] == [["False True True"] * 2] * 3, ended
    assert [one.returncode for one in ended] == [0, 1, 3]
    assert not list(made.glob("lit-qrl-vllm-*"))


def test_a_folder_is_removed_once():
    folder = model_folder(build_network(), None, (), False, torch.float32, 32)
    remove(folder)
    folder.mkdir()
    remove(folder)
    assert folder.is_dir()
    folder.rmdir()
