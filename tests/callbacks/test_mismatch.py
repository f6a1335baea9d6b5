import json
import math
from itertools import pairwise

import pytest
import torch

from lit_qrl.callbacks import GeometricRejection, MaskedIS, MismatchMonitor
from lit_qrl.module import GRPOModule
from lit_qrl.objective import GRPO
from tests.tables import csv_rows
from tests.tiny_run import build, fit


def column(folder, name):
    return [float(row[name]) for row in csv_rows(folder / "run" / "metrics.csv") if row.get(name)]


def test_a_coarser_format_shows_a_larger_mismatch(tmp_path):
    kls = []
    for format in ("fp32", "bf16", "fp8_row"):
        fit(tmp_path / format, format=format, trainer={"max_epochs": 1})
        kls.append(column(tmp_path / format, "mismatch/abs_log_ratio")[0])
    assert kls[0] < 1e-5 < kls[1] < kls[2]
    for name in ("kl_k1", "ess_ratio", "chi2_token", "ppl_ratio"):
        assert len(column(tmp_path / "bf16", f"mismatch/{name}")) == 1
    # one update for a rollout has no ratio
    assert column(tmp_path / "bf16", "update/ratio_p99") == []
    assert "Updates of negative samples" not in pictures(tmp_path / "bf16")


def test_every_n_iterations(tmp_path):
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 4})
    monitor = next(c for c in trainer.callbacks if isinstance(c, MismatchMonitor))
    monitor.every_n_iterations = 2
    trainer.fit(module, datamodule=data)
    assert len(column(tmp_path, "mismatch/kl_k3")) == 2


def pictures(folder):
    return {one["title"]: one for one in json.loads((folder / "run" / "histograms.json").read_text())["histograms"]}


class Updates(MismatchMonitor):
    """Also keeps the tokens of every update."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rows = batch.batch
        d = (pl_module.iteration.logprobs - rows.learner_old_logprobs)[rows.mask]
        p = rows.learner_old_logprobs.exp()[rows.mask]
        a = rows.advantages[:, None].expand_as(rows.mask)[rows.mask]
        self.seen += list(zip(d.tolist(), p.tolist(), a.tolist(), strict=True))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def test_update_ratios_of_all_micro_batches_in_table_and_pictures(tmp_path):
    trainer, module, data = build(
        tmp_path, data={"mini_batches": 2, "micro_batches": 2, "passes": 2}, trainer={"max_epochs": 1}, lr=3e-2
    )
    watch = Updates()
    trainer.callbacks = [watch if isinstance(c, MismatchMonitor) else c for c in trainer.callbacks]
    trainer.fit(module, datamodule=data)
    ratios = sorted(math.exp(max(-2.0, min(2.0, d))) for d, _, _ in watch.seen)
    for name, level in (("p01", 0.01), ("p99", 0.99)):
        wanted = ratios[math.ceil(level * len(ratios)) - 1]
        assert column(tmp_path, f"update/ratio_{name}") == [pytest.approx(wanted, rel=1.1e-3)]
    assert ratios[-1] > 1.02
    drawn = pictures(tmp_path)
    for sign, title in ((-1, "Updates of negative samples"), (1, "Updates of positive samples")):
        one = drawn[title]
        counts = torch.tensor(one["counts"])
        assert float(counts.sum()) == sum(a * sign > 0 for _, _, a in watch.seen)
        edges = one["x"]["edges"]
        pairs = list(pairwise(edges))[1:-1]
        inner = [sum(a * sign > 0 and low <= d < high for d, _, a in watch.seen) for low, high in pairs]
        assert (counts.sum(1)[1:-1] - torch.tensor(inner)).abs().max() <= 1
        assert one["lines"] == pytest.approx([math.log(0.8), math.log(1.2)])


@pytest.mark.parametrize("mode", ["bypass", "policy_gradient"])
def test_without_a_scoring_pass_it_measures_the_sequences_of_the_first_update(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(GRPOModule, "score", None)  # would fail
    data = {"mini_batches": 4, "micro_batches": 2}
    objective = GRPO(scale="none", old_logprobs=mode)
    fit(tmp_path, data=data, objective=objective, trainer={"max_epochs": 1}, lr=1.0)
    monkeypatch.undo()
    fit(tmp_path / "whole", data=data, trainer={"max_epochs": 1}, lr=1.0)
    for name in ("abs_log_ratio", "ess_ratio"):
        (part,), (whole,) = (column(folder, f"mismatch/{name}") for folder in (tmp_path, tmp_path / "whole"))
        assert part == pytest.approx(whole, rel=0.5), name  # before the first update; after it they are far apart
        assert part != whole


NONE = GeometricRejection(lower=0.0, upper=1e9)


@pytest.mark.parametrize("callback", [GeometricRejection(upper=1.001), MaskedIS("sequence", upper=1.001), NONE])
def test_accepted_by_length_where_something_is_rejected(tmp_path, callback):
    _, module, _ = fit(tmp_path, callbacks=[callback], trainer={"max_epochs": 1})
    one = pictures(tmp_path).get("Accepted by length")
    assert (one is None) == (callback is NONE)
    if callback is NONE:
        return
    assert one["x"]["edges"][-1] == module.data.max_completion_tokens
    shares = one["counts"]["share of sequences"]
    assert all(0 <= share <= 1 for share in shares)
    assert min(shares) < 1
