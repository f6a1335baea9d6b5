"""The evaluation sets of the papers: how each draws, written out here once more, and rows of the sets."""

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_qrl import rewards
from lit_qrl.data import tasks
from lit_qrl.data.benchmark import Benchmark, evaluation_sets
from tests.rewards.datasets import DATA

CONFIGS = Path(__file__).parents[2] / "configs" / "task"
# Imported so that short class names resolve.
assert tasks.DatasetTask
assert rewards.MathReward

GREEDY, EIGHT = (True, 0, None, None), (False, 8, 0.6, 1.0)
QARL, QERL = (False, 1, 0.6, 1.0), (False, 4, 0.6, 0.95)
PAPERS = {  # set: greedy, samples, temperature, top-p
    "eval_ais": (
        4096,
        {
            "gsm8k": GREEDY, "math500": GREEDY, "aime24": EIGHT, "aime25": EIGHT, "amc": (False, 16, 0.6, 0.95),
            "olympiadbench": GREEDY, "sudoku": GREEDY,
        },
    ),
    "eval_qarl": (
        16384,
        {
            **dict.fromkeys(("aime24", "aime25", "amc23"), (False, 8, 0.6, 1.0)),
            **dict.fromkeys(("math500", "minerva_math", "olympiadbench"), QARL),
        },
    ),
    "eval_qerl": (4096, dict.fromkeys(("gsm8k", "math500", "aime24", "aime25", "amc23"), QERL)),
    "eval_jetrl": (8192, {"gsm8k": GREEDY, "math500": GREEDY}),
}  # fmt: skip
# Columns of the files that are called otherwise on the hub.
FILES = {
    "amc": ("amc23", {}),
    "minerva_math": ("minerva_math", {"prompt_column": "problem", "answer_column": "solution"}),
}


def content(name):
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]


def built(benchmarks):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--benchmarks", type=list[Benchmark])
    return parser.instantiate(parser.parse_object({"benchmarks": benchmarks})).benchmarks


def test_every_config_of_evaluation_sets_is_here():
    assert {path.stem for path in CONFIGS.glob("eval_*.yaml")} == set(PAPERS)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_sets_are_drawn_as_the_paper_says(paper):
    data, (length, expected) = content(paper), PAPERS[paper]
    own = {
        "samples": data.get("evaluation_samples", 1), "temperature": data.get("evaluation_temperature", 1.0),
        "top_p": data.get("evaluation_top_p", 1.0), "greedy": data["evaluation_greedy"],
        "completion_tokens": data["evaluation_completion_tokens"],
    }  # fmt: skip
    sets = evaluation_sets(None, 0, own, built(data["benchmarks"]))
    found = {
        one.name: (one.greedy, one.samples, *((one.temperature, one.top_p) if one.samples else (None, None)))
        for one in sets
    }
    assert found == expected
    assert {one.completion_tokens for one in sets} == {length}
    if paper == "eval_ais":
        assert list(sets[4].accuracies) == ["pass@1", "pass@16"]
        assert list(sets[0].accuracies) == ["greedy_pass@1"]


@pytest.mark.parametrize(
    "entry",
    [one for paper in PAPERS for one in content(paper)["benchmarks"] if one["name"] != "sudoku"],
    ids=lambda entry: entry["name"],
)
def test_rows_of_a_set_are_read(entry):
    file, columns = FILES.get(entry["name"], (entry["name"], {}))
    arguments = {key: value for key, value in entry["task"]["init_args"].items() if key not in ("subset", "path")}
    task = tasks.DatasetTask(str(DATA / f"{file}.jsonl"), **{**arguments, **columns})
    task.setup()
    rows = task.evaluation_rows()
    assert len(rows) >= 15
    assert list(task.train_rows()) == []
    assert task.prompt(rows[0])[-1]["content"].endswith(arguments["prompt_suffix"])
