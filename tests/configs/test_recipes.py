"""The recipes against the tables of their papers, `tests/files/papers.yaml`, and two of them run at tiny scale."""

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_qrl.cli.config_files import config_files, expanded
from lit_qrl.cli.main import main
from lit_qrl.rewards.base import Sample, score_all
from lit_qrl.rewards.math import MathReward
from lit_qrl.rewards.simple import FormatReward
from tests.tables import csv_rows

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))
PAPERS = yaml.safe_load((ROOT / "tests" / "files" / "papers.yaml").read_text())
MARK = re.compile(r"# deviates(?:, (?P<name>[^:]+))?: ")


@dataclass(frozen=True)
class Held:
    """A value of a recipe, and the line of the mark beside or above it."""

    value: Any
    mark: tuple[str, int] | None = None


composed = cache(lambda file: yaml.compose(Path(file).read_text()))


def named(node):
    """Return the last name of the class that a node describes, or nothing."""
    kinds = [v.value for k, v in node.value if k.value == "class_path"] if isinstance(node, yaml.MappingNode) else []
    return kinds[0].rpartition(".")[2] if kinds else ""


class Recipe:
    """The values of a recipe by key, and its marks: of a value those in its line or above it, others by a row's name.

    Keys are those of the parser without `init_args`; what a list of classes holds is named by the class. The files that
    a recipe lists come one after the other, and the last word holds.
    """

    def __init__(self, path):
        self.held, self.notes = {}, {}
        files = list(config_files(expanded(["--config", str(path)])))
        for file in files if files == [str(path)] else [*files, str(path)]:
            self.lines, self.file = Path(file).read_text().splitlines(), Path(file).name
            for number, line in enumerate(self.lines):
                if (found := MARK.search(line)) and found["name"]:
                    self.notes[found["name"]] = (self.file, number)
            if file != str(path) or files == [str(path)]:
                self._read("", composed(file), 0)

    def _mark(self, line, node):
        """Return the mark of a key: behind its value, or in the comments directly above it."""
        last = node.end_mark if isinstance(node, yaml.ScalarNode) or node.flow_style else node.start_mark
        if MARK.search(self.lines[min(last.line, len(self.lines) - 1)][last.column :]):
            return self.file, last.line
        while line and self.lines[line - 1].lstrip().startswith("#"):
            line -= 1
            if (found := MARK.search(self.lines[line])) and not found["name"]:
                return self.file, line
        return None

    def _forget(self, key):
        self.held = {old: held for old, held in self.held.items() if old != key and not old.startswith(f"{key}.")}

    def _read(self, key, node, line):
        plain = yaml.SafeLoader("").construct_object(node, deep=True)
        if not isinstance(node, yaml.MappingNode):
            self._forget(key)
            self.held[key] = Held(plain, self._mark(line, node))
            for part in node.value if isinstance(node, yaml.SequenceNode) else []:
                if name := named(part):
                    self._read(f"{key}.{name}", part, part.start_mark.line)
            return
        if (name := named(node)) and self.held.get(key, Held("")).value.rpartition(".")[2] not in ("", name):
            self._forget(key)
        for name_node, value in node.value:
            name = name_node.value
            inner = key if name in ("class_path", "init_args") else f"{key}.{name}".lstrip(".").rstrip("+")
            if name == "class_path":
                self.held[key] = Held(value.value, self._mark(name_node.start_mark.line, value))
            else:
                self._read(inner, value, name_node.start_mark.line)


def fits(value, expected):
    if isinstance(expected, dict):
        if "any" in expected:
            return value in expected["any"]
        return expected["from"] <= value <= expected["to"]
    return value == expected


def test_every_recipe_holds_what_its_paper_prints_or_says_that_it_deviates():
    """Compare each row of the tables with each of its recipes: equal and unmarked, or different and marked."""
    wrong, used, there, rows_of = [], set(), set(), set()
    for path in RECIPES:
        recipe = Recipe(path)
        tables = [table for table in PAPERS if any(fnmatch(path.stem, pattern) for pattern in table["recipes"])]
        wrong += [] if tables else [f"{path.stem} is in no table"]
        there |= {*recipe.notes.values(), *(one.mark for one in recipe.held.values() if one.mark)}
        for table in tables:
            rows_of.add(table["title"])
            for row in table["rows"]:
                keys = row["key"] if isinstance(row.get("key"), list) else [row.get("key")]
                held = [recipe.held.get(key, Held(None)) for key in keys]
                value = prod(one.value for one in held) if len(held) > 1 else held[0].value
                same = row.get("key") is not None and fits(value, row["value"])
                # What a recipe says of a row by its name need not concern another one that lists it.
                note = None if same else recipe.notes.get(row["name"])
                mark = note or next((one.mark for one in held if one.mark), None)
                if same == bool(mark):
                    what = f"marks {row['name']}, which is the paper's" if same else f"has {value!r} for {row['name']}"
                    wrong.append(f"{path.stem} {what} ({table['title']}, {row['where']}: {row.get('value')!r})")
                used |= {mark} if mark and not same else set()
    assert not wrong, "\n".join(wrong)
    assert there == used, f"marks that are no deviation of any table: {sorted(there - used)}"
    assert rows_of == {table["title"] for table in PAPERS}


@pytest.mark.parametrize(("baseline", "fragment"), [("nf4_qlora", "nf4_lora"), ("mxfp4_lora", "mxfp4_lora")])
def test_a_baseline_of_the_paper_is_a_fragment_by_another_name(baseline, fragment):
    assert Recipe(CONFIGS / f"baseline/{baseline}.yaml").held == Recipe(CONFIGS / f"precision/{fragment}.yaml").held


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
        return csv_rows(folder / "metrics.csv"), yaml.safe_load((folder / "config.yaml").read_text())

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
