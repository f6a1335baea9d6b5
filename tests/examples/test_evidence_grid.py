import importlib
import sys
from itertools import pairwise

import pytest

from tests.examples.scripts import EXAMPLES, importing, write_run
from tests.tables import csv_rows

SHIPPED = EXAMPLES.parent / "docs" / "figures" / "evidence"


@pytest.fixture
def grid():
    with importing("evidence_grid", "evidence_study", "", "mismatch_dial") as module:
        yield module("grid")


@pytest.fixture
def odds(grid):
    return importlib.import_module("odds")


def finish(grid, planned, learner, reward=0.5):
    """Write the folder that a run of 20 iterations would leave."""
    rows = [{"epoch": at, "reward/mean": reward, "mismatch/abs_log_ratio": 0.1 * (at + 1)} for at in range(20)]
    for row in rows[9::10]:
        row["val/accuracy"] = learner
    write_run(planned.job, grid.studies.record, rows)


def test_the_grid_has_the_settings_of_the_study_and_each_run_once(grid, tmp_path):
    assert grid.settings().common == grid.studies.load(EXAMPLES / "evidence_study").common
    planned = [one for arms in grid.BLOCKS.values() for one in grid.of_block(arms, grid.SEEDS, tmp_path)]
    planned += grid.replays(tmp_path)
    keys = {(one.study, one.rate, one.job.arm, one.job.seed) for one in planned}
    assert len(keys) == len({one.job.folder for one in planned})
    assert not {one.job.seed for one in planned if one.study == "grid"} & {*range(10), 100, 101}
    for one in planned:
        options = dict(pairwise(one.job.arguments))
        assert options["--model.policy.model"].removeprefix(f"{tmp_path}/models/") in one.job.arm.split("+")
        assert options["--trainer.max_epochs"] == str(grid.ITERATIONS if one.study == "grid" else 10)
    # every arm has the bf16 sampler that it is compared with
    arms = {one.job.arm for one in planned if one.study == "grid"}
    assert {grid.grid_table.control_of(arm) for arm in arms} <= arms
    assert all(one.rate == 1e-4 for one in planned if one.study == "grid" and "slow" in one.job.arm)


def test_replays_are_the_earlier_runs_of_a_plain_learner(grid, tmp_path):
    found = {(one.study, one.rate, one.job.arm, one.job.seed) for one in grid.replays(tmp_path)}
    kept = [row for row in csv_rows(SHIPPED / "runs.csv") if not row["arm"].endswith(("bf16", "aligned"))]
    assert {one for one in found if one[0] == "runs"} == {("runs", 2e-4, row["arm"], int(row["seed"])) for row in kept}
    assert sum(study == "pilot" for study, *_ in found) == 32


def test_a_line_for_each_run_and_a_table_of_differences(grid, tmp_path, capsys, monkeypatch):
    arms = ("s8+none+bf16", "s8+none+int4")
    monkeypatch.setattr(grid, "BLOCKS", {"levels": arms})
    out = tmp_path / "out"
    for one in grid.of_block(arms, (10, 11), out):
        finish(
            grid,
            one,
            (0.9 if one.job.arm.endswith("bf16") else 0.5) + 0.01 * (one.job.seed - 10) * (one.job.arm[-1] == "4"),
        )
    assert grid.main(["--blocks", "levels", "--report", "--out", str(out)]) == 0
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].strip("|").split("|")]
    assert cells[:2] == ["s8+none+int4", "2"]
    assert cells[6] == "-0.395 ± 0.005"
    assert (out / "results" / "levels.png").read_bytes().startswith(b"\x89PNG")
    rows = grid.grid_table.read(out / "results" / "runs.csv")
    assert len(rows) == 4
    # metrics of the iterations 1 to 5 and 6 to 10
    assert rows[0]["abs_log_ratio_a"] == pytest.approx(0.3)
    assert rows[0]["abs_log_ratio_b"] == pytest.approx(0.8)
    assert rows[0]["log_ratio_1"] == pytest.approx(0.1)
    assert rows[0]["grad_norm_a"] is None
    # what an earlier call has is not run again
    asked = ["--blocks", "levels", "--seeds", "10", "11", "--list"]
    assert grid.main([*asked, "--before", str(out / "results"), "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == ""


def test_the_shipped_models_and_figures_are_what_the_command_computes(odds, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(odds, "BOOTSTRAPS", 20)  # of the intervals, which are not compared
    grid_table = sys.modules["grid_table"]
    rows = grid_table.read(SHIPPED / "grid" / "runs.csv")
    lines, models = odds.judged(odds.examples_of(rows, SHIPPED))
    for name, model in models.items():
        shipped = getattr(importlib.import_module("loss_models"), name.upper())
        assert model.inputs == shipped.inputs
        for field in ("lowest", "highest", "center", "spread", "weight"):
            assert getattr(model, field) == pytest.approx(getattr(shipped, field), rel=1e-5, abs=1e-6)
        assert model.constant == pytest.approx(shipped.constant, rel=1e-5)
    space = {}
    exec(odds.source_of(models, 40), space)
    assert [space[name.upper()] for name in models] == list(models.values())
    written = (SHIPPED / "grid" / "odds.md").read_text().splitlines()
    for line, row in zip(lines, written[2:], strict=False):
        assert row.startswith(f"| {line.name} | {line.runs} | {line.lost} | {line.auroc:.3f} | ")
    assert grid_table.write(rows, tmp_path) == (SHIPPED / "grid" / "table.md").read_text().rstrip("\n")
    assert (tmp_path / "runs.csv").read_text() == (SHIPPED / "grid" / "runs.csv").read_text()
