import json

import pytest
from transformers.utils.logging import enable_progress_bar

from lit_qrl import formats
from lit_qrl.cli.audit import audit, verdict
from lit_qrl.cli.parser import CommandParser
from lit_qrl.cli.parser import run as called
from lit_qrl.errors import ConfigError
from lit_qrl.formats.support import names_where
from lit_qrl.policy import CausalPolicy
from tests.families import configs as families
from tests.networks import build_denoiser
from tests.tiny_run import model_folder


@pytest.fixture
def arguments(tmp_path):
    rows = [{"question": f"{i}+1="} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, prompts = model_folder(tmp_path / "model"), str(tmp_path / "rows.jsonl")
    return ["--model", model, "--prompts", prompts, "--chat", "false", "--max_tokens", "8", "--device", "cpu"]


def test_each_format_gets_a_row_and_coarser_ones_differ_more(arguments, tmp_path, capsys):
    out = tmp_path / "audit.json"
    called(
        audit, [*arguments, "--formats", "bf16", "fp8_row", "nvfp4", "int4_group", "--samples", "4", "--out", str(out)]
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed.pop(0).startswith("int4_group is left out: 14 layers do not fit")  # 64 inputs, groups of 128
    assert printed[0] == "4 prompts x 4 completions of up to 8 tokens. A completion ends with '<eos>'."
    assert [line.split()[0] for line in printed[3:7]] == ["learner", "bf16", "fp8_row", "nvfp4"]
    assert not printed[7:]
    figures = json.loads(out.read_text())["formats"]
    distances = [row["abs_log_ratio"] for row in figures.values()]
    assert distances[0] < 1e-5  # the learner's own arithmetic in the engine
    assert distances == sorted(distances)
    assert distances[1] > 1e-5
    bits = [row["bits"] for row in figures.values()]
    assert bits[:2] == [32, 16]
    assert 8 < bits[2] < 16  # embeddings, norms and scales count too
    assert bits[3] < bits[2]
    assert all(0 < row["tokens"] <= 4 * 4 * 8 for row in figures.values())


def test_the_same_seed_measures_the_same(arguments, tmp_path):
    for name in ("a", "b"):
        called(audit, [*arguments, "--formats", "fp8_row", "--out", str(tmp_path / name)])
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--formats", "fp8_rows"], r"Did you mean 'fp8_row'"),
        (["--prompt_column", "questions"], r"no column 'questions'.*Did you mean 'question'"),
        (["--prompts", "nope.jsonl"], r"'nope.jsonl' does not exist"),
        (["--model", "./nothing"], r"does not exist"),
        (["--max_prompt_tokens", "1"], r"longer than --max_prompt_tokens"),
        (["--samples", "0"], r"--samples is too small"),
        (["--temperature", "0"], r"--temperature is too small"),
        (["--chat", "true"], r"no chat template"),
        (["--out", "no/where.json"], r"--out cannot be written"),
        (["--config", "configs/quickstart.yaml"], r"has them twice.*--model, --prompts, --config"),
    ],
)
def test_what_cannot_be_measured(more, message, arguments):
    with pytest.raises(ConfigError, match=message):
        called(audit, [*arguments, *more])


def test_the_help_says_which_formats_are_not_measured():
    *others, last = names_where(lambda row: not row.audited)
    text = " ".join(CommandParser(audit).format_help().split())
    assert f"(default: all but {', '.join(others)} and {last})" in text
    assert set(names_where(lambda row: row.audited)) | {*others, last} == set(formats.names())


def test_no_bar_of_another_library_stands_between_the_rows(arguments, capsys):
    enable_progress_bar()
    printed = dict(zip(arguments[::2], arguments[1::2], strict=True))
    metrics = audit(
        model=printed["--model"], prompts=printed["--prompts"], chat=False, max_tokens=8, formats=["bf16"], samples=2
    )
    assert list(metrics) == ["learner", "bf16"]
    assert "Loading weights" not in capsys.readouterr().err


def test_a_model_without_linear_layers_is_measured_in_its_own_dtype(arguments, tmp_path, capsys):
    folder = families.model_folder(families.BY_TYPE["gpt2"], tmp_path / "gpt2")
    called(audit, [*arguments, "--model", folder, "--samples", "1", "--formats", "bf16", "fp8_row"])
    printed = capsys.readouterr().out
    assert (
        "fp8_row is left out: fp8_row applies to nn.Linear, and this model's layers are transformers' Conv1D" in printed
    )
    table = printed.strip().split("\n\n")[-1]
    assert [line.split()[0] for line in table.splitlines()] == ["format", "learner", "bf16"]


def test_a_model_that_the_engine_cannot_run_is_refused_before_its_weights_are_loaded(arguments, tmp_path, monkeypatch):
    folder = families.model_folder(families.BY_TYPE["mamba2"], tmp_path / "mamba2")
    monkeypatch.setattr(CausalPolicy, "configure", lambda self: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match="carry a state"):
        called(audit, [*arguments, "--model", folder])


def test_a_masked_diffusion_model_is_measured_by_its_own_engine(arguments, tmp_path):
    folder = model_folder(tmp_path / "denoiser", build_denoiser)
    results = called(audit, [*arguments, "--model", folder, "--formats", "bf16", "fp8_row", "--max_tokens", "8"])
    assert list(results) == ["learner", "bf16", "fp8_row"]
    assert results["learner"]["abs_log_ratio"] < 1e-5 < results["fp8_row"]["abs_log_ratio"] < 0.5
    with pytest.raises(ConfigError, match="no multiple of a block"):
        called(audit, [*arguments, "--model", folder, "--max_tokens", "40"])


def test_a_model_without_prompts_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"no model and prompts.*--config alone.*--model"):
        called(audit, arguments[:2])
    with pytest.raises(ConfigError, match=r"Given: none of them\. See lit-qrl audit --help"):
        called(audit, [])


def test_options_of_a_format_make_a_row_of_their_own(arguments):
    formats = ["nvfp4", "nvfp4:four_over_six"]
    results = called(audit, [*arguments, "--samples", "4", "--formats", *formats])
    assert list(results) == ["learner", *formats]
    assert results[formats[0]]["abs_log_ratio"] != results[formats[1]]["abs_log_ratio"] > 1e-4


def test_speed_is_tokens_by_seconds_of_the_whole_rollout(arguments, capsys):
    called(audit, [*arguments, "--samples", "2", "--formats", "bf16", "fp8_row", "--speed"])
    table, said = capsys.readouterr().out.split("\n\n")[1:]
    heads, *rows = (line.split() for line in table.splitlines())
    assert heads[-3:] == ["tokens/s", "publish", "s"]
    for row in rows:
        assert len(row) == len(heads) - 5  # five headings are of two words
        assert float(row[-2]) > 0
        assert 0 < float(row[-1]) < 60
    assert said.startswith("At 2 x 4 completions ")
    assert "fp8_row" in said


def figures(rate, publish, distance, tokens=1000.0):
    return {"tokens": tokens, "tokens_per_second": rate, "publish_seconds": publish, "abs_log_ratio": distance}


def test_the_verdict_counts_rollout_and_publish_together():
    results = {
        "learner": figures(100.0, 0.5, 0.0),  # 10.5 s
        "bf16": figures(125.0, 0.4, 0.001, 800.0),  # 8.4
        "fp8_row": figures(200.0, 1.0, 0.01),  # 6
        "nvfp4": figures(250.0, 4.0, 0.02),  # 8
    }
    dense = {"learner", "bf16"}
    assert verdict(results, dense, "1 x 2 completions") == (
        "At 1 x 2 completions fp8_row is the fastest, 1.40 times bf16: rollout and publish take 6 s instead of 8.4, "
        "mean |d| is 0.01 instead of 0.001."
    )
    results["fp8_row"] = figures(100.0, 0.0, 0.01)
    results["nvfp4"] = figures(125.0, 0.3, 0.02)  # within what two runs of the same differ by
    assert verdict(results, dense, "x").startswith("At x no format is faster than bf16. The nearest is nvfp4: ")
    assert verdict({"learner": results["learner"]}, dense, "x") == (
        "No format of 8 or 4 bits was measured beside learner."
    )
