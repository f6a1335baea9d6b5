"""The QeRL recipes hold the paper's values: Table 4, §4.1 and Appendix E, written out here once more."""

import csv
from functools import reduce
from pathlib import Path

import pytest
import yaml

from lit_qrl.cli.config_files import config_files, expanded
from lit_qrl.cli.main import main
from lit_qrl.rewards.base import Sample, score_all
from lit_qrl.rewards.math import MathReward
from lit_qrl.rewards.simple import FormatReward

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("qerl_*.yaml"))
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


def merged(old, new):
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), value) for key, value in new.items()}


def content(path):
    """Return what the files of a recipe hold together, the later over the earlier."""
    files = config_files(expanded(["--config", str(path)]))
    return reduce(merged, (yaml.safe_load(Path(file).read_text()) for file in files))


@pytest.mark.parametrize(("baseline", "fragment"), [("nf4_qlora", "nf4_lora"), ("mxfp4_lora", "mxfp4_lora")])
def test_a_baseline_of_the_paper_is_a_fragment_by_another_name(baseline, fragment):
    assert content(CONFIGS / f"baseline/{baseline}.yaml") == content(CONFIGS / f"precision/{fragment}.yaml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_values_are_the_papers(path):
    config = content(path)
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
    assert (data["temperature"], data["evaluation_temperature"], data["evaluation_top_p"]) == (1.0, 0.6, 0.95)
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
    assert data["micro_batches"] == {"3b": 16, "7b": 32, "14b": 64, "32b": 128}[size]


def test_the_ais_recipe_has_the_composed_reward_and_says_that_the_model_does_not_think():
    config = yaml.safe_load((CONFIGS / "recipes" / "gsm8k_fp8_ais.yaml").read_text())
    policy, objective = (config["model"][part]["init_args"] for part in ("policy", "objective"))
    assert policy["chat_template_args"] == {"enable_thinking": False}
    assert objective["kl_estimator"] == "k3+"
    options = config["data"]["task"]["init_args"]
    kinds = {"MathReward": MathReward, "FormatReward": FormatReward}
    rewards = [kinds[one["class_path"]](**one["init_args"]) for one in options["rewards"]]
    assert [type(reward) for reward in rewards] == [MathReward, FormatReward]
    answers = {
        "<reasoning>6 and 1</reasoning>\n<answer>7</answer>": 2.5,
        "<reasoning>6 and 1</reasoning> <answer>8</answer>": 0.5,
        "It is <answer>7</answer>": 2.0,
        "7": 0.0,
    }
    samples = [Sample("", completion, "7") for completion in answers]
    assert score_all(rewards, samples).total == list(answers.values())
    for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
        assert tag in options["system_prompt"]


# What a recipe for one GPU needs to run on one core with the policy that ships: a model, a task, an engine and a device
# that are there, sizes and a learning rate for a model of 1 M weights, and accuracy at the temperature of the rollout.
ITERATIONS = 10  # a stage of noise each
TINY = {
    "model.policy.model": ROOT / "models" / "tiny-countdown",
    "data.micro_batches": 1,
    "data.evaluation_limit": 500,
    "data.evaluation_temperature": 1.0,
    "data.evaluation_top_p": 1.0,
    "data.evaluation_greedy": "false",
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": ITERATIONS,
    "trainer.enable_progress_bar": "false",
}
LR = 1e-3
GAIN = 0.08  # of accuracy and of reward; the run below gains 0.14 of both


@pytest.fixture
def train(tmp_path, monkeypatch, quick_plots):
    """Return the metrics of `lit-qrl fit` with a recipe as it is and what `TINY` and the arguments override."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored when the runs have set it

    def train(recipe, **overrides):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        files = [f"recipes/{recipe}", "task/countdown", "engine/transformers"]
        arguments = [f"--config={CONFIGS / file}.yaml" for file in files]
        options = {
            **TINY,
            "trainer.default_root_dir": folder,
            **{k.replace("__", "."): v for k, v in overrides.items()},
        }
        main(["fit", *arguments, *(f"--{key}={value}" for key, value in options.items())])
        with (folder / "metrics.csv").open() as file:
            return list(csv.DictReader(file)), yaml.safe_load((folder / "config.yaml").read_text())

    return train


def column(rows, name):
    return [float(row[name]) for row in rows if row.get(name)]


@pytest.mark.timeout(900)  # half a minute on a core of its own
def test_the_whole_recipe_learns_at_tiny_scale(train):
    """NVFP4 base, LoRA, noise and GRPO with four updates per rollout; the same without a learning rate stays."""
    evaluated = {"trainer__check_val_every_n_epoch": ITERATIONS}
    learned, config = train("qerl_7b_gsm8k", model__optimizer__lr=LR, **evaluated)
    still, _ = train("qerl_7b_gsm8k", model__optimizer__lr=0, data__passes=1, **evaluated)
    assert config["data"]["passes"] == 4
    assert [one["class_path"].rpartition(".")[2] for one in config["trainer"]["plugins"]] == ["NVFP4LoRA"]
    assert config["model"]["policy"]["init_args"]["lora"]["init_args"]["r"] == 32
    assert config["model"]["optimizer"]["class_path"] == "bitsandbytes.optim.AdamW8bit"
    assert column(learned, "noise/sigma")[:2] == [0.0, pytest.approx(1e-2)]
    assert column(learned, "noise/sigma")[-1] == pytest.approx(5e-4)
    assert set(column(learned, "noise/perturbed_norms")[1:]) == {8.0}
    (before, after), (control, unmoved) = column(learned, "val/accuracy"), column(still, "val/accuracy")
    assert before == control == unmoved
    assert after > before + GAIN
    # The same prompts, drawn with the same seeds: the first rollout is the same, the last five are not.
    rewards, unmoved = column(learned, "reward/mean"), column(still, "reward/mean")
    assert rewards[0] == unmoved[0]
    assert sum(rewards[5:]) / 5 > sum(unmoved[5:]) / 5 + GAIN


@pytest.mark.timeout(600)
def test_the_recipe_with_dapo_steps_at_tiny_scale(train):
    short = {"trainer__max_epochs": 3, "trainer__callbacks__num_stages": 3, "trainer__limit_val_batches": 0}
    rows, config = train("qerl_7b_bigmath", model__optimizer__lr=LR, **short)
    objective = config["model"]["objective"]
    assert objective["class_path"].rpartition(".")[2] == "DAPO"
    assert [objective["init_args"][f"clip_{side}"] for side in ("low", "high")] == [0.2, 0.28]
    assert objective["init_args"]["reduction"] == "token"
    assert column(rows, "noise/sigma") == pytest.approx([0.0, 1e-2, 5e-4])
    assert len(column(rows, "reward/mean")) == 3
    assert min(column(rows, "update/grad_norm")) > 0
    assert all(0 < value < 1 for value in column(rows, "reward/mean"))


LLADA = sorted((CONFIGS / "recipes").glob("llada_*.yaml"))
STEPS = {"gsm8k": 7700, "math": 6600, "countdown": 5000, "sudoku": 3800}
CORRECTED = {"none": [], "tis": ["TruncatedIS"], "ais": ["AIS"]}


def test_there_is_a_llada_recipe_for_every_task_and_correction():
    assert [path.stem for path in LLADA] == sorted(f"llada_{task}_fp8_{how}" for task in STEPS for how in CORRECTED)


@pytest.mark.parametrize("path", LLADA, ids=lambda path: path.stem)
def test_the_values_are_those_of_the_ais_papers_table_3(path):
    config = content(path)
    _, task, _, how = path.stem.split("_")
    policy, objective = config["model"]["policy"]["init_args"], config["model"]["objective"]["init_args"]
    data, optimizer = config["data"], config["model"]["optimizer"]
    assert (config["model"]["policy"]["class_path"], policy["model"]) == (
        "DiffusionPolicy",
        "GSAI-ML/LLaDA-8B-Instruct",
    )
    assert (policy["prompt_masking"], policy["lora"]["init_args"]["r"]) == (0.15, 128)
    assert len(policy["lora"]["init_args"]["target_modules"]) == 7
    assert (objective["clip_low"], objective["clip_high"], objective["scale"]) == (0.2, 0.2, "none")
    assert (optimizer["class_path"], optimizer["init_args"]["betas"]) == ("torch.optim.AdamW", [0.9, 0.99])
    assert optimizer["init_args"]["weight_decay"] == 0.1
    assert 1e-6 <= optimizer["init_args"]["lr"] <= 3e-6
    assert data["engine"] == {"class_path": "DiffusionEngine", "init_args": {"block": 32, "steps": 16}}
    assert (data["group_size"], data["prompts_per_iteration"] * data["group_size"]) == (8, 96)
    assert (data["max_prompt_tokens"], data["max_completion_tokens"]) == (256, 256)
    assert [one["completion_tokens"] for one in data["benchmarks"]] == [128, 256, 512]
    assert all(one["task"] == data["task"] and one["samples"] == 0 for one in data["benchmarks"])
    assert config["publisher"]["format"] == "fp8_tensor"
    assert (config["trainer"]["gradient_clip_val"], config["trainer"]["max_epochs"]) == (0.2, STEPS[task])
    assert [one["class_path"] for one in config["trainer"]["callbacks"]] == CORRECTED[how]
    if how == "ais":
        expected = {"clip": 5.0, "saturation": 0.02, "tolerance": 1.2}
        assert config["trainer"]["callbacks"][0]["init_args"] == expected
