"""The QeRL recipes hold the paper's values: Table 4, §4.1 and Appendix E, written out here once more."""

from pathlib import Path

import pytest
import yaml

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("qerl_*.yaml"))
SUFFIX = (
    "Solve the following math problem step by step. The reasoning process and direct answer are enclosed within "
    "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>: <think> ... </think> <answer> ... </answer>"
)
LEVELS = {"3b": [3, 4, 5], "7b": [3, 4, 5], "14b": [3, 4, 5], "32b": [4, 5]}


def test_there_is_one_for_every_size_and_task():
    assert [path.stem for path in RECIPES] == sorted(
        f"qerl_{size}_{task}" for size in LEVELS for task in ("gsm8k", "bigmath")
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_values_are_the_papers(path):
    config = yaml.safe_load(path.read_text())
    _, size, task = path.stem.split("_")
    gsm8k = task == "gsm8k"
    policy, objective = config["model"]["policy"]["init_args"], config["model"]["objective"]
    data = config["data"]
    assert policy["model"] == f"Qwen/Qwen2.5-{size.upper()}-Instruct"
    assert (policy["lora"]["init_args"]["r"], policy["lora"]["init_args"]["target_modules"]) == (32, "all-linear")
    assert objective["class_path"] == ("GRPO" if gsm8k else "DAPO")
    assert (objective["init_args"]["clip_low"], objective["init_args"]["clip_high"]) == (0.2, 0.28)
    assert not {"kl_coefficient", "entropy_coefficient"} & objective["init_args"].keys()
    assert config["model"]["optimizer"]["class_path"] == "bitsandbytes.optim.AdamW8bit"
    assert config["model"]["optimizer"]["init_args"]["lr"] == 1e-5
    assert data["group_size"] == (8 if gsm8k else 16)
    assert data["prompts_per_iteration"] * data["group_size"] == 128
    assert data["passes"] * data.get("mini_batches", 1) == (4 if gsm8k else 1)
    assert data["max_completion_tokens"] == (4096 if gsm8k else 8192)
    assert (data["temperature"], data["evaluation_temperature"]) == (1.0, 0.6)
    task_options = data["task"]["init_args"]
    assert task_options["prompt_suffix"] == f"\n\n{SUFFIX}"
    if not gsm8k:
        assert task_options["subset"] == [f"level_{level}" for level in LEVELS[size]]
    (plugin,) = config["trainer"]["plugins"]
    assert (plugin["class_path"], plugin["init_args"]) == ("NVFP4LoRA", {"format": "nvfp4"})
    (noise,) = config["trainer"]["callbacks"]
    assert noise["class_path"] == "AQNNoise"
    expected = {"start": 1e-2, "end": 5e-4, "num_stages": 10, "schedule": "exponential"}
    assert noise["init_args"] == expected
    assert config["trainer"]["max_epochs"] >= 10
    assert config["data"]["engine"]["init_args"]["max_lora_rank"] >= 32
