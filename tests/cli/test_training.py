import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from lit_qrl import callbacks, objective, rollout
from lit_qrl.cli.main import main
from lit_qrl.cli.training import FORCED, check_callbacks, classes_at, told
from lit_qrl.errors import ConfigError

RUNS = Path("runs/sums")


def steps(run):
    return torch.load(RUNS / run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]


class Wandering(Callback):
    """Changes the working directory, as a reward may."""

    def on_train_batch_end(self, *args):
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")


def test_a_run_stays_in_its_folder_whatever_changes_the_working_directory(lit, tmp_path):
    wandering = ["--trainer.callbacks+", f"{__name__}.Wandering", "--trainer.limit_val_batches", 1]
    assert lit("fit", *wandering, "--report.every_n_iterations", 1)[0] == 0
    assert Path.cwd() == tmp_path / "elsewhere"
    assert not list(Path.cwd().iterdir())
    assert names(tmp_path / RUNS) == ["1"]
    run = tmp_path / RUNS / "1"
    assert {"config.yaml", "events.jsonl", "metrics.csv", "samples.jsonl"} <= set(names(run))
    assert names(run / "checkpoints") == ["last.ckpt"]
    assert "val/accuracy" in (run / "metrics.csv").read_text()


def names(folder=RUNS):
    return sorted(path.name for path in folder.iterdir())


def test_the_run_is_resumed_whatever_was_validated_or_refused_after_it(lit):
    assert lit("fit")[0] == 0
    status, text = lit("validate", "--trainer.limit_val_batches", 1)
    assert status == 0
    assert f"Problems: 4 of dataset; format: fp32; kept in {RUNS}/validate/1/metrics.csv." in text
    assert lit("fit", "--data.micro_batches", 3)[0] == 2
    assert lit("fit", "--data.group_size", 1)[0] == 2
    assert names() == ["1", "validate"]
    (RUNS / "7").mkdir()
    for option, n in ((("--ckpt_path", "last"), 2), (("--resume_if_possible", "true"), 3)):
        status, text = lit("fit", *option, "--trainer.max_epochs", n)
        assert status == 0
        assert "Resuming runs/sums/1." in text
        assert "other settings" not in text
        assert steps("1") == n
    assert names() == ["1", "7", "validate"]


def test_a_run_that_cannot_be_resumed_says_so(lit):
    status, text = lit("fit", "--ckpt_path", "last")
    assert status == 2
    assert "no checkpoint to resume from. Expected: runs/sums/*/checkpoints/last.ckpt." in text
    assert not Path("runs").exists()
    status, text = lit("fit", "--resume_if_possible", "true")
    assert status == 0
    assert "There is no checkpoint to resume from; starting runs/sums/1." in text


def test_other_settings_are_named_and_the_former_are_kept_and_a_refused_resumption_leaves_them_alone(lit):
    assert lit("fit")[0] == 0
    first = (RUNS / "1" / "config.yaml").read_text()
    # whatever shorter names there are: a run of before goes on without a word about its policy
    assert yaml.safe_load(first)["model"]["policy"]["class_path"] == "lit_qrl.policy.CausalPolicy"
    assert lit("fit", "--ckpt_path", "last", "--data.group_size", 1)[0] == 2
    assert (RUNS / "1" / "config.yaml").read_text() == first
    assert not (RUNS / "1" / "config.1.yaml").exists()
    changes = ("--trainer.callbacks+=AIS", "--data.temperature", 0.9, "--trainer.max_epochs", 2)
    status, text = lit("fit", *changes, "--ckpt_path", "last")
    assert status == 0
    assert "other settings than it was trained with: data.temperature, trainer.callbacks.AIS. The former are in" in text
    assert "runs/sums/1/config.1.yaml" in text
    assert (RUNS / "1" / "config.1.yaml").read_text() == first
    assert yaml.safe_load((RUNS / "1" / "config.yaml").read_text())["data"]["temperature"] == 0.9

    checkpoint = ("--ckpt_path", RUNS / "1" / "checkpoints" / "last.ckpt")
    changes = ("--data.temperature", 0.8, "--trainer.max_epochs", 3)
    assert "The former are in runs/sums/1/config.yaml." in lit("fit", *changes, *checkpoint)[1]
    assert names() == ["1", "2"]


def test_predictions_are_kept_in_the_run_whose_checkpoint_is_taken(lit):
    assert lit("fit")[0] == 0
    before = {path.name: path.read_bytes() for path in (RUNS / "1").iterdir() if path.is_file()}
    status, text = lit("predict", "--ckpt_path", "last")
    assert status == 0
    assert "Taking runs/sums/1/checkpoints/last.ckpt." in text
    assert "Predictions: runs/sums/1/predict/1/predictions.jsonl (4 completions, mean reward" in text
    records = (RUNS / "1" / "predict" / "1" / "predictions.jsonl").read_text().splitlines()
    assert [set(json.loads(line)) for line in records] == [
        {"benchmark", "prompt", "completion", "reward", "parts", "correct"}
    ] * 4
    assert {path.name: path.read_bytes() for path in (RUNS / "1").iterdir() if path.is_file()} == before
    assert "runs/sums/predict/1/predictions.jsonl" in lit("predict")[1]


def test_every_forced_callback_has_a_group_and_cannot_be_added():
    for group, cls in FORCED.items():
        with pytest.raises(ConfigError, match=f"holds {cls.__name__}.*`{group}`"):
            check_callbacks([cls()])


def test_names_that_resolve_are_those_of_the_kind():
    corrections = [name for name in callbacks.__all__ if name != "RLCallback"]
    assert set(corrections) <= set(classes_at("trainer.callbacks"))
    assert "RLCallback" not in classes_at("trainer.callbacks")
    assert sorted(classes_at("data.engine")) == sorted(
        name for name in vars(rollout) if name.endswith("Engine") and name != "RolloutEngine"
    )
    kinds = {name for name, value in vars(objective).items() if isinstance(value, type)}
    assert set(classes_at("model.objective")) <= kinds
    assert "GRPO" in classes_at("model.objective")
    assert {"torch.optim.AdamW", "MuonAdamW"} <= set(classes_at("model.optimizer"))
    assert {"AIS", "GRPO", "VLLMEngine"} <= set(classes_at())
    assert {"CSVLogger", "TensorBoardLogger"} <= set(classes_at("trainer.logger"))
    assert "AIS" not in classes_at("trainer.logger")
    assert classes_at("trainer.profiler") == {}


def test_help_begins_with_examples_and_speaks_of_this_program_s_checkpoints(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = capsys.readouterr().out
    first, _, text = shown.partition("\n")
    assert first == "usage: lit-qrl fit --config FILE [--config FILE ...] [--KEY VALUE ...]"
    head = ["  lit-qrl fit --config configs/quickstart.yaml\n", "  --data.group_size ", "\noptions:"]
    groups = ["\nmodel: ", "\ndata: ", "\npublisher: ", "\noptions of this command:", "\ntrainer: "]
    places = [text.index(word) for word in (*head, *groups)]
    assert places == sorted(places)
    text = " ".join(text.split())
    assert "`last`, that of the newest run of this configuration that has one. (type: " in text
    assert "passes_per_step(data.micro_batches) --> trainer.accumulate_grad_batches" in text


def test_an_accuracy_is_told_once_with_its_interval():
    lines = told(
        {
            "val/greedy_pass@1": torch.tensor(0.34765625),
            "val/greedy_pass@1_ci_low": torch.tensor(0.29),
            "val/greedy_pass@1_ci_high": torch.tensor(0.4081),
            "val/gsm8k/avg@4": 0.5,
        }
    )
    assert lines == ["val/greedy_pass@1  0.348  [0.290, 0.408]", "val/gsm8k/avg@4    0.500"]
    assert told({}) == []
