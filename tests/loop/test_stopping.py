from pathlib import Path

import pytest
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from lit_qrl.errors import ConfigError
from tests.tables import csv_rows
from tests.tiny_run import fit


def stopping(**options):
    return EarlyStopping(**{"monitor": "reward/mean", "mode": "max", "patience": 2, "min_delta": 10.0, **options})


@pytest.mark.parametrize("every", [1, 5])
def test_a_metric_of_iterations_is_watched_from_the_first_on(tmp_path, every):
    options = {"max_epochs": 9, "limit_val_batches": 1, "check_val_every_n_epoch": every}
    trainer, _, _ = fit(tmp_path, callbacks=[stopping()], trainer=options)
    assert trainer.current_epoch == 3  # the first sets the bar, two do not pass it
    assert trainer.checkpoint_callback._saved == trainer.global_step


def test_a_metric_of_evaluations_is_watched_there(tmp_path):
    options = {"max_epochs": 9, "limit_val_batches": 1, "check_val_every_n_epoch": 2}
    trainer, _, _ = fit(tmp_path, callbacks=[stopping(monitor="val/accuracy")], trainer=options)
    assert trainer.current_epoch == 4  # that of the untrained policy, and two more


def test_a_resumed_run_counts_on(tmp_path):
    fit(tmp_path, callbacks=[stopping()], trainer={"max_epochs": 2})
    saved = str(tmp_path / "run" / "checkpoints" / "last.ckpt")
    trainer, _, _ = fit(tmp_path, callbacks=[stopping()], ckpt_path=saved, trainer={"max_epochs": 9})
    assert trainer.current_epoch == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_steps": 3}, r"max_steps would end .* middle of an iteration.*multiple of its 2.*max_epochs to 2"),
        ({"limit_train_batches": 1}, "limit_train_batches.*part of each iteration.*Given: 1.*prompts_per_iteration"),
        ({"overfit_batches": 0.5}, "overfit_batches.*part of each iteration"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch is too small.*limit_val_batches to 0"),
        (GradientAccumulationScheduler({0: 2}), r"GradientAccumulationScheduler would.*Remove it.*data\.micro_batches"),
        (StochasticWeightAveraging(1e-3), r"StochasticWeightAveraging .*average nothing.*EMAWeightAveraging"),
    ],
)
def test_what_would_cut_an_iteration_or_do_otherwise_than_it_says_is_refused(tmp_path, options, words):
    given = {"trainer": options} if isinstance(options, dict) else {"callbacks": [options]}
    with pytest.raises(ConfigError, match=words):
        fit(tmp_path, data={"mini_batches": 2}, **given)
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize("options", [{"max_steps": 2}, {"fast_dev_run": True}])
def test_whole_iterations_and_a_trial_of_one_batch_are_not(tmp_path, options):
    trainer, _, _ = fit(tmp_path, data={"mini_batches": 2}, trainer={"max_epochs": 3, **options})
    assert trainer.global_step == (1 if "fast_dev_run" in options else 2)


def test_a_checkpoint_is_kept_by_the_metric_of_its_own_iteration(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="reward/mean", mode="max", save_top_k=-1, filename="{epoch}")
    fit(tmp_path, callbacks=[best], trainer={"max_epochs": 3, "check_val_every_n_epoch": 2, "limit_val_batches": 1})
    rows = [row for row in csv_rows(tmp_path / "run" / "metrics.csv") if row["reward/mean"]]
    scores = {Path(path).stem: float(score) for path, score in best.best_k_models.items()}
    assert scores == {f"epoch={row['epoch']}": pytest.approx(float(row["reward/mean"])) for row in rows}
    assert len(scores) == 3
