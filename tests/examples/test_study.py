import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import pytest
import yaml

from tests.examples.scripts import EXAMPLES, importing, write_run
from tests.tables import csv_rows

STUDIES = ("real_study", "mismatch_study", "alignment_study", "qerl_study", "mixture_study")

TOML = """
base = ["configs/quickstart.yaml"]
seeds = 2
baseline = "none+bf16"
arms = ["none+bf16", "{none,tis}+int4"]
[groups]
"INT4" = ["{none,tis}+int4"]
[power]
arm = "none+int4"
accuracy_loss = 0.05
abs_log_ratio = 0.05
[config]
data = { mini_batches = 4 }
[parts.none]
files = ["configs/correction/none.yaml"]
[parts.tis]
config.trainer.callbacks = [{ class_path = "TruncatedIS", init_args = { upper = 3.0 } }]
[parts.bf16]
files = ["configs/precision/rollout_bf16.yaml"]
[parts.int4]
files = ["configs/precision/rollout_int4_group.yaml"]
[variants.strong.config]
data = { passes = 2 }
"""


@pytest.fixture
def study():
    with importing("") as module:
        yield module("study")


@pytest.fixture
def small(study, tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "study.toml").write_text(TOML)
    return study.load(folder)


def fake_run(study, job, accuracies, log_ratio=0.01, ending="finish"):
    """Write the folder that a run of `job` would leave."""
    rows = [
        {"epoch": epoch, "reward/mean": accuracy / 2, "mismatch/abs_log_ratio": log_ratio, "val/accuracy": accuracy}
        for epoch, accuracy in enumerate(accuracies)
    ]
    more = {"mismatch/ess_ratio": 1 - log_ratio, "mismatch/kl_k3": 0.001}
    write_run(job, study.record, [row | more for row in rows], ending)


@pytest.mark.parametrize("name", STUDIES)
def test_shipped_studies_can_be_read_and_draw_arms_that_they_have(study, name):
    loaded = study.load(EXAMPLES / name)
    assert loaded.seeds == (3 if name == "real_study" else 5)
    drawn = {pattern for patterns in loaded.groups.values() for pattern in patterns if "*" not in pattern}
    assert drawn <= set(loaded.arms)


def test_plan_gives_files_in_order_and_a_folder_for_each_seed(study, small, tmp_path):
    jobs = study.plan(small, tmp_path / "out", extra=["--trainer.max_epochs", "3"])
    assert [(job.arm, job.seed) for job in jobs] == [
        (arm, seed) for seed in (0, 1) for arm in ("none+bf16", "none+int4", "tis+int4")
    ]
    arguments = jobs[-1].arguments
    files = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--config"]
    assert [Path(file).stem for file in files] == ["quickstart", "common", "tis", "rollout_int4_group"]
    assert yaml.safe_load(Path(files[1]).read_text()) == {"data": {"mini_batches": 4}}
    (callback,) = yaml.safe_load(Path(files[2]).read_text())["trainer"]["callbacks"]
    assert callback == {"class_path": "TruncatedIS", "init_args": {"upper": 3.0}}
    options = dict(pairwise(arguments))
    assert options["--seed_everything"] == "1"
    assert options["--trainer.max_epochs"] == "3"
    assert options["--resume_if_possible"] == "true"
    assert options["--trainer.default_root_dir"] == str(tmp_path / "out" / "tis+int4" / "1")
    assert len({job.fingerprint for job in jobs}) == 6
    part = study.plan(small, tmp_path / "out", arms=["tis*"], seeds=[1], extra=["--trainer.max_epochs", "3"])
    assert part == jobs[-1:]


def test_a_finished_runs_weights_are_evaluated_with_the_files_of_the_study_or_of_a_part(study, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    asked = 'learner = ["configs/precision/rollout_bf16.yaml"]\n'
    (folder / "study.toml").write_text(asked + TOML.replace("[parts.int4]", "[parts.int4]\nlearner = []"))
    plain, packed, _ = study.plan(study.load(folder), tmp_path / "out", seeds=[0])
    assert plain.learner[0] == "validate"
    assert plain.learner.count("--config") == plain.arguments.count("--config") + 1
    assert dict(pairwise(plain.learner))["--ckpt_path"] == "last"
    assert packed.learner == ()


def test_planning_again_leaves_the_files_that_runs_are_reading(study, small, tmp_path):
    study.plan(small, tmp_path / "runs")
    before = {path: path.stat().st_ino for path in (tmp_path / "runs" / "configs").iterdir()}
    study.plan(small, tmp_path / "runs")
    assert before
    assert before == {path: path.stat().st_ino for path in (tmp_path / "runs" / "configs").iterdir()}
    (changed := tmp_path / "runs" / "configs" / "common.yaml").write_text("data: {}\n")
    study.plan(small, tmp_path / "runs")
    assert yaml.safe_load(changed.read_text()) == {"data": {"mini_batches": 4}}
    assert sorted(before) == sorted((tmp_path / "runs" / "configs").iterdir())


def test_a_variant_has_its_own_name_and_configuration(study, small, tmp_path):
    strong = study.load(tmp_path / "small", "strong")
    assert strong.name == "small-strong"
    (job,) = study.plan(strong, tmp_path / "out", arms=["none+int4"], seeds=[0])
    assert str(tmp_path / "out" / "configs" / "variant-strong.yaml") in job.arguments
    (plain,) = study.plan(small, tmp_path / "out", arms=["none+int4"], seeds=[0])
    assert plain.fingerprint != job.fingerprint


def test_finished_runs_are_left_alone_and_cut_ones_go_on(study, small, tmp_path, monkeypatch, capsys):
    jobs = study.plan(small, tmp_path / "out", seeds=[0])
    assert [job.state for job in jobs] == ["new"] * 3
    fake_run(study, jobs[0], [0.5])
    fake_run(study, jobs[1], [0.5], ending=None)
    (jobs[1].folder / "checkpoints").mkdir()
    (jobs[1].folder / "checkpoints" / "last.ckpt").touch()
    assert [job.state for job in jobs] == ["finished", "cut", "new"]
    ran = []
    monkeypatch.setattr(study, "run_one", lambda job: (ran.append(job), (0, 1.0))[1])
    assert study.run_all(jobs) == []
    assert ran == jobs[1:]
    assert "1 of 3 runs are finished" in capsys.readouterr().out


def test_runs_of_another_configuration_are_refused_and_a_report_counts_them(study, small, tmp_path, capsys):
    out, extra = tmp_path / "out", ["--trainer.max_epochs", "9"]
    for job in study.plan(small, out, seeds=[0], extra=extra):
        fake_run(study, job, [0.5])
    others = study.plan(small, out, seeds=[0])
    assert [job.state for job in others] == ["changed"] * 3
    with pytest.raises(study.StudyError, match="another configuration"):
        study.run_all(others)
    asked = [str(tmp_path / "small"), "--out", str(out), "--seeds", "0", "--report"]
    assert study.main(asked) == 0
    printed = capsys.readouterr().out
    assert "0 of 3 runs finished. 3 folders hold runs of another configuration" in printed
    assert "arguments after `--`" in printed
    assert study.main([*asked, "--", *extra]) == 0
    assert "3 of 3 runs finished.\n" in capsys.readouterr().out


def test_a_failed_run_is_named_and_the_others_go_on(study, small, tmp_path, monkeypatch, capsys):
    jobs = study.plan(small, tmp_path / "out", seeds=[0])
    monkeypatch.setattr(study.sys, "executable", "false")
    assert {job.arm for job in study.run_all(jobs, parallel=2)} == {job.arm for job in jobs}
    assert capsys.readouterr().out.count("FAILED") == 3
    recorded = json.loads((jobs[0].folder / study.COMMAND_FILE).read_text())
    assert recorded["arguments"] == list(jobs[0].arguments)


def test_table_and_figure_of_fake_runs(study, small, tmp_path, capsys):
    out = tmp_path / "out"
    final = {"none+bf16": (0.60, 0.70), "none+int4": (0.50, 0.62), "tis+int4": (0.58, 0.66)}
    for job in study.plan(small, out):
        fake_run(study, job, [0.4, 0.45, final[job.arm][job.seed]], log_ratio=0.03 if "int4" in job.arm else 0.001)
    assert study.main([str(tmp_path / "small"), "--out", str(out), "--report"]) == 0
    text = capsys.readouterr().out
    assert "6 of 6 runs finished" in text
    assert (out / "table.md").read_text().strip() == text.strip()
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)}
    header = dict(zip(rows["Arm"], rows["none+int4"], strict=True))
    assert header["Seeds"] == "2"
    assert header["Accuracy"] == "0.56 ± 0.06"
    # Differences −0.1 and −0.08: mean −0.09, standard error 0.01, and t quantiles of one degree of freedom.
    assert header["against baseline"] == "-0.09 ± 0.01"
    assert float(header["detectable"]) == pytest.approx((12.706 + 1.376) * 0.01, rel=1e-2)
    assert header["Reward, first third"] == "0.2 ± 0"
    assert header["last third"] == "0.28 ± 0.03"
    assert header["mean abs. log-ratio"] == "0.03 ± 0"
    assert header["lowest ESS"] == "0.97"
    assert rows["none+bf16"][3] == "–"
    assert "loses 0.09 ± 0.01" in text
    assert "can tell corrections apart" in text


@pytest.mark.parametrize(
    ("loss", "log_ratio", "said"),
    [
        (0.0, 0.01, "has no power"),
        (0.0, 0.06, "is a mismatch to act on, but"),
        (0.06, 0.01, "can tell corrections apart"),
    ],
)
def test_power_is_a_loss_and_without_one_a_mismatch_is_said(study, small, tmp_path, loss, log_ratio, said):
    jobs = study.plan(small, tmp_path / "out", arms=["none+*"], seeds=[0])
    for job in jobs:
        fake_run(study, job, [0.5 - loss if "int4" in job.arm else 0.5], log_ratio=log_ratio)
    results = [(job.arm, job.seed, study.Run(job.folder)) for job in jobs]
    text = study.write_report(small, results, 6, tmp_path / "out")
    others = {"has no power", "is a mismatch to act on, but", "can tell corrections apart"} - {said}
    assert said in text
    assert not any(other in text for other in others)


def test_unfinished_runs_stay_out_of_the_table(study, small, tmp_path, capsys):
    jobs = study.plan(small, tmp_path / "out", seeds=[0])
    fake_run(study, jobs[0], [0.5])
    fake_run(study, jobs[1], [0.9], ending="exception")
    assert study.main([str(tmp_path / "small"), "--out", str(tmp_path / "out"), "--report"]) == 0
    text = capsys.readouterr().out
    assert "1 of 6 runs finished" in text
    assert "none+int4 |" not in text
    assert "Power: unknown" in text


def test_bad_studies_are_refused_in_one_sentence(study, tmp_path, capsys):
    for change, message in (
        (("{none,tis}", "{none,tsi}"), "Did you mean 'tis'?"),
        (("seeds", "sedes"), "Did you mean 'seeds'?"),
        (('baseline = "none+bf16"', 'baseline = "none+bf"'), "is not an arm"),
        (("quickstart.yaml", "quick.yaml"), "does not exist"),
        (("[parts.none]", "[parts.none"), "is not TOML"),
    ):
        path = tmp_path / "study.toml"
        path.write_text(TOML.replace(*change))
        assert study.main([str(path), "--list", "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
    path.write_text(TOML)
    assert study.main([str(path), "--arms", "none+int", "--list", "--out", str(tmp_path / "out")]) == 2
    assert "Did you mean 'none+int4'?" in capsys.readouterr().err
    assert study.main([str(path), "--variant", "weak", "--list"]) == 2
    assert study.main([str(tmp_path / "nothing"), "--list"]) == 2


def test_errors_of_single_seeds_are_not_a_number(study):
    report = sys.modules["study_report"]
    assert math.isnan(report.standard_error([1.0]))
    assert report.spread([0.5]) == "0.5"
    assert report.third(report.Series([1, 2, 3, 4, 5, 6], [1.0, 1.0, 2.0, 2.0, 3.0, 4.0]), 2) == 3.5


def test_what_was_foretold_of_the_real_runs_is_what_the_page_says(study, capsys):
    with importing("", "evidence_study", "evidence_grid", "real_study") as module:
        module("foretold").main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0:1] == "|"]
    page = (EXAMPLES.parent / "docs" / "studies" / "evidence.md").read_text()
    told = [line.split("|")[2:] for line in page[page.index("**Was it foretold?**") :].splitlines() if line[0:1] == "|"]
    assert [line.split("|")[2:] for line in lines] == told[: len(lines)]
    assert [cell.strip() for cell in told[2][:3]] == ["26", "11", "0.818"]


def test_the_page_has_the_claims_table_of_the_rows_beside_it(study):
    docs = EXAMPLES.parent / "docs"
    with importing("", "evidence_study", "real_study") as module:
        claims = module("claims")
        lines = claims.table(claims.known([docs / "figures" / "evidence" / "real" / "curves.csv"]), {})
    decided = [line for line in lines if not line.endswith("| not run |")]
    assert len(decided) > 15
    assert "\n".join(decided) in (docs / "studies" / "evidence.md").read_text()


def test_claims_of_the_real_study_are_tested_over_seeds_and_by_block(study, tmp_path):
    arms = {
        "grpo+none+bf16": ((0.10, 0.300), (0.11, 0.310), (0.12, 0.320)),
        "grpo+none+int4_group": ((0.07, 0.205), (0.07, 0.210), (0.07, 0.225)),
        "grpo+sequence_tis+int4_group": ((0.07, 0.100), (0.07, 0.400), (0.07, 0.200)),
        "distillation+none+aligned_int4": ((0.07, 0.075), (0.08, 0.085), (0.07, 0.075)),
    }
    whole = study.load(EXAMPLES / "real_study")
    for job in study.plan(whole, tmp_path, list(arms)):
        fake_run(study, job, arms[job.arm][job.seed])
    with importing("", "evidence_study", "real_study") as module:
        claims = module("claims")
        runs = claims.known([tmp_path])
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in claims.table(runs, {})[2:]]
        assert {claim.arm for claim in claims.CLAIMS} <= set(whole.arms)
        claims.write_curves(runs, tmp_path / "curves.csv")
        assert claims.known([tmp_path / "curves.csv"]) == runs
    curves = csv_rows(tmp_path / "curves.csv")
    assert len(curves) == 4 * 3 * 2
    one = next(row for row in curves if row["arm"] == "grpo+none+bf16" and (row["seed"], row["row"]) == ("1", "1"))
    assert (one["val/accuracy"], one["mismatch/abs_log_ratio"], one["val/stopped"]) == ("0.31", "0.01", "")
    named = {(row[0], row[1].strip("`")): row[3:] for row in rows}

    def two_sided(values):  # Student's t with two degrees of freedom has a closed form
        t = fmean(values) / (stdev(values) / math.sqrt(3))
        return 1 - abs(t) / math.sqrt(2 + t * t)

    loss = named["A4", "grpo+none+int4_group"]
    assert (loss[0], loss[1], loss[5]) == ("3", "-0.097", "confirmed")
    assert float(loss[3]) == pytest.approx(
        2 * two_sided([-0.095, -0.1, -0.095]), rel=0.02
    )  # of two of its letter that were run
    other = named["A4", "grpo+sequence_tis+int4_group"]
    assert (float(other[3]), other[5]) == (pytest.approx(two_sided([-0.105, 0.19, -0.025]), rel=0.02), "not decided")
    assert named["D1", "distillation+none+aligned_int4"][1] == "+0.005"
    assert named["M1", "grpo+none+int4_group+revert"][5] == "not run"
