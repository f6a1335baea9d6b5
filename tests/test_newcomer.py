"""What a newcomer does with nothing but the pages: their files, their commands, the policy that ships."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import Dataset
from lightning.pytorch.accelerators import CUDAAccelerator
from transformers import AutoTokenizer

from lit_qrl.cli.main import main
from lit_qrl.run.event_log import read_jsonl
from tests.tables import csv_rows
from tests.test_snippets import ROOT, here, snippets, words, write_modules

__all__ = ["here"]
MODEL = ROOT / "models" / "tiny-countdown"
NUMBERS = [((3, 5, b), 3 * 5 + b) for b in range(1, 10)] + [((b, 2, 4), b - 2 + 4) for b in range(3, 10)]
PROBLEMS = [(f"{','.join(map(str, n))}={total}:", f"{n[0]}*{n[1]}+{n[2]}", str(total)) for n, total in NUMBERS]
"""Question, answer and total."""
TEMPLATE = "{% for turn in messages %}{{ turn.content }}{% endfor %}"


@pytest.fixture
def newcomer(here, monkeypatch):
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: None)  # drawing takes seconds
    return here


def of(page, kind, having=""):
    return [one.text for one in snippets(ROOT / "docs" / page) if one.kind == kind and having in one.text]


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def fit(*more):
    """Train for one iteration without evaluations; return its metrics and its samples."""
    small = ["--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0", "--data.prompts_per_iteration", "4"]
    main(["fit", *more, *small, "--trainer.default_root_dir", "run"])
    rows = csv_rows("run/metrics.csv")
    return {key: value for row in rows for key, value in row.items() if value}, list(read_jsonl("run/samples.jsonl"))


def with_template():
    """Write the tokenizer that ships with a chat template of plain text; return the options that take it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("tokenizer")
    return ["--model.policy.tokenizer", "tokenizer"]


def test_rows_and_a_function_of_ones_own(newcomer):
    page = ROOT / "docs" / "index.md"
    write_modules(page, newcomer)
    (config,) = of("index.md", "yaml")
    Path("mine.yaml").write_text(config)
    (shown,) = of("index.md", "json")
    rows = [{"question": question, "answer": answer} for question, answer, _ in PROBLEMS]
    assert json.loads(shown) in rows
    write_rows("problems.jsonl", rows)
    (command,) = (given for text in of("index.md", "bash", "mine.yaml") for given in words(text))
    metrics, samples = fit(*command[2:])
    brief = [float(len(one["completion"].strip()) <= len("3*5+7")) for one in samples]
    assert [one["reward"] for one in samples] == brief
    assert float(metrics["reward/brief"]) == float(metrics["reward/mean"])
    assert Path("run/checkpoints/last.ckpt").is_file()


def test_chats(newcomer):
    (config,) = of("data.md", "yaml", "path: chats.jsonl")
    Path("chats.yaml").write_text(config)
    rows = [{"prompt": [{"role": "user", "content": one}], "answer": total} for one, _, total in PROBLEMS]
    write_rows("chats.jsonl", rows)
    given = ["--config", "configs/quickstart.yaml", "--config", "chats.yaml", "--data.task.evaluation_size", "4"]
    metrics, samples = fit(*given, *with_template())
    posed = {row["prompt"][0]["content"] for row in rows}
    assert samples
    assert all(any(text in one["prompt"] for text in posed) for one in samples)
    assert "reward/mean" in metrics


def test_a_script_of_trl(newcomer):
    """The two runs of the page: the file here, and the script where TRL is installed."""
    write_modules(ROOT / "docs" / "from_trl.md", newcomer)
    Path("after.yaml").write_text(*of("from_trl.md", "yaml", "# after.yaml"))
    (shown,) = of("from_trl.md", "json")
    rows = [{"prompt": question, "answer": answer} for question, answer, _ in PROBLEMS]
    assert json.loads(shown) in rows
    write_rows("problems.jsonl", rows)
    metrics, samples = fit("--config", "after.yaml")
    assert len(samples) == 4
    assert float(metrics["reward/brief"]) == float(metrics["reward/mean"])
    if find_spec("trl") is not None:
        subprocess.run([sys.executable, "before.py"], check=True)


def test_a_command_of_verl(newcomer):
    """Rows and scores of verl's make, without a change, for a run here."""
    write_modules(ROOT / "docs" / "from_verl.md", newcomer)
    Path("after.yaml").write_text(*of("from_verl.md", "yaml", "# after.yaml"))
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
        }
        for index, (question, answer, _) in enumerate(PROBLEMS)
    ]
    Path("gsm8k").mkdir()
    for file, half in (("train.parquet", rows[4:]), ("test.parquet", rows[:4])):
        Dataset.from_list(half).to_parquet(Path("gsm8k") / file)
    small = {
        "model.policy.model": MODEL,
        "data.engine": "TransformersEngine",
        "data.mini_batches": 1,
        "data.max_prompt_tokens": 16,
        "data.max_completion_tokens": 16,
    }
    given = [part for key, value in small.items() for part in (f"--{key}", str(value))]
    metrics, samples = fit("--config", "after.yaml", *given, *with_template())
    assert len(samples) == 4
    assert 0 <= float(metrics["reward/score"]) == float(metrics["reward/mean"]) <= 1


@pytest.mark.slow
def test_an_environment(newcomer):
    write_modules(ROOT / "docs" / "environments.md", newcomer)
    config = of("environments.md", "yaml", "guess.Guess")[0].replace(
        "max_completion_tokens: 2048", "max_completion_tokens: 64"
    )
    Path("guess.yaml").write_text(config)
    given = ["--config", "configs/quickstart.yaml", "--config", "guess.yaml", "--data.max_prompt_tokens", "64"]
    metrics, _ = fit(*given, *with_template())
    assert float(metrics["environment/turns"]) >= 1
    assert float(metrics["mismatch/abs_log_ratio_turn_1"]) < 0.1  # what follows the first answer has others of its own
    assert not float(metrics.get("environment/ended_error", 0))


def accuracies():
    """Return the held-out accuracy before the first iteration, and the best of the last two evaluations."""
    found = [float(row["val/accuracy"]) for row in csv_rows("run/metrics.csv") if row.get("val/accuracy")]
    return found[0], max(found[-2:])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_environment_of_two_turns_is_learned(newcomer):
    sys.path.append("examples/tool_environment")
    try:
        configs = ["--config", "configs/quickstart.yaml", "--config", "examples/tool_environment/config.yaml"]
        main(["fit", *configs, "--trainer.default_root_dir", "run"])
    finally:
        sys.path.remove("examples/tool_environment")
    before, after = accuracies()
    assert after >= before + 0.1
