import json
import math
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.examples.scripts import EXAMPLES, importing, write_run
from tests.tables import csv_rows

LEARNER = {"s10+none+bf16": 0.9, "s10+none+int4": 0.2, "s10+tis+int4": 0.7, "s10+none+int4_aligned": 0.88}


@pytest.fixture
def run():
    with importing("evidence_study", "", "mismatch_dial") as module:
        yield module("run")


@pytest.fixture
def jobs(run, tmp_path):
    study = run.studies.load(EXAMPLES / "evidence_study")
    return run.jobs_of(study, [run.Phase(tuple(LEARNER), range(3))], tmp_path / "out", run.rate_option(2e-4))


def finish(run, job, learner, sampler=0.5):
    """Write the folder that a run of 40 iterations would leave."""
    same = {"reward/mean": sampler, "mismatch/abs_log_ratio": 0.1, "mismatch/ess_ratio": 0.8}
    evaluated = [{"val/accuracy": learner + epoch / 1000} if epoch % 10 == 9 else {} for epoch in range(40)]
    write_run(job, run.studies.record, [{"epoch": epoch, **same, **one} for epoch, one in enumerate(evaluated)])


def test_paired_tests_of_too_few_and_of_equal_differences(run):
    paired_test = sys.modules["summary"].paired_test
    assert paired_test([]) == paired_test([0.4]) == paired_test([0.0, 0.0]) == 1.0
    assert paired_test([0.1, 0.1]) == 0.0
    assert paired_test([0.1, -0.1]) == pytest.approx(1.0)


def test_the_arms_of_the_first_hypothesis_are_run_first_and_all_are_known(run, tmp_path):
    scale = "s12"
    study = run.studies.load(EXAMPLES / "evidence_study")
    jobs = run.jobs_of(study, run.phases_of(scale, quick=False), tmp_path, [])
    pilot = [job for there in run.pilot_jobs(study, tmp_path, []).values() for job in there]
    assert len({(job.arm, job.seed) for job in jobs}) == len(jobs)
    assert {job.seed for job in jobs if job.arm == f"{scale}+none+int4"} == set(range(10))
    first = {arm for arm in study.arms if arm.startswith(scale) and "fp8" not in arm}
    assert {job.arm for job in jobs[:9]} == first
    assert {job.arm for job in jobs} >= first | {arm for arm in study.arms if arm.startswith("s4+")}
    assert len({job.folder for job in (*pilot, *jobs)}) == len(pilot) + len(jobs)
    assert not {job.seed for job in pilot} & {job.seed for job in jobs}
    assert {run.summary.level_of(arm) for arm in study.arms} == set(run.summary.SETTINGS)
    for job in (*pilot, *jobs):
        (part,) = set(job.arm.split("+")) & set(run.SCALES)
        assert dict(pairwise(job.arguments))["--model.policy.model"] == str(tmp_path / "models" / part)
    quick = run.jobs_of(study, run.phases_of(scale, quick=True), tmp_path, [])
    assert {(job.arm, job.seed) for job in quick} == {
        (f"{scale}+none+{sampler}", seed) for sampler in ("bf16", "int4", "int4_aligned") for seed in range(3)
    }


@pytest.mark.parametrize(
    ("bf16", "int4", "chosen"),
    [
        ({1e-4: 0.96, 2e-4: 0.97, 4e-4: 0.90}, {"s8": 0.9, "s10": 0.6, "s12": 0.1}, (2e-4, "s10")),
        ({1e-4: 0.96, 2e-4: 0.97, 4e-4: 0.99}, {"s8": 0.5, "s10": 0.6, "s12": 0.1}, (4e-4, "s8")),
        ({1e-4: 0.80, 2e-4: 0.70, 4e-4: 0.10}, {"s8": 0.79, "s10": 0.7, "s12": 0.75}, (1e-4, "s10")),
    ],
)
def test_the_pilot_chooses_by_its_rules(run, bf16, int4, chosen):
    def outcome(arm, accuracy):
        return run.summary.Outcome(arm, 100, 160, accuracy, 0.5, 0.5, accuracy, 0.1, 0.1, 0.1, 0.9)

    outcomes = {
        rate: [outcome(f"{scale}+none+bf16", accuracy) for scale in run.SCALES]
        + [outcome(f"{scale}+none+int4", there) for scale, there in int4.items()]
        + [outcome("s4+none+int3", 0.0)]
        for rate, accuracy in bf16.items()
    }
    choice = run.choose(outcomes)
    assert (choice.rate, choice.scale) == chosen
    assert run.choose({**outcomes, 9e-4: []}) == choice  # a rate of which no run has finished


def test_the_pilot_of_the_page_is_drawn_and_chose_as_its_rules_say(run, tmp_path):
    shipped = EXAMPLES.parent / "docs" / "figures" / "evidence"
    rows = csv_rows(shipped / "pilot.csv")
    outcomes = {}
    for row in rows:
        kinds = {"arm": str, "seed": int, "iterations": int}
        values = {name: kinds.get(name, float)(value) for name, value in row.items() if name != "rate"}
        outcomes.setdefault(float(row["rate"]), []).append(run.summary.Outcome(**values))
    assert {rate: len(there) for rate, there in outcomes.items()} == dict.fromkeys(run.RATES, 16)
    assert run.choose(outcomes) == run.Choice(**json.loads((shipped / "choice.json").read_text())) == run.DEFAULT
    run.summary.write_pilot(tmp_path, outcomes)
    assert (tmp_path / "pilot.csv").read_text() == (shipped / "pilot.csv").read_text()
    run.draw_pilot(tmp_path)
    assert (tmp_path / "pilot.png").read_bytes().startswith(b"\x89PNG")


def test_tables_and_verdicts_of_the_page_follow_from_its_runs(run, tmp_path, capsys):
    shipped = EXAMPLES.parent / "docs" / "figures" / "evidence"
    assert run.main(["--out", str(tmp_path), "--report", "--before", str(shipped)]) == 0
    for name in ("runs.csv", "curves.csv", "tests.csv", "table.md", "verdicts.md"):
        assert (tmp_path / "results" / name).read_text() == (shipped / name).read_text()
    assert (tmp_path / "results" / "figure.png").read_bytes().startswith(b"\x89PNG")
    # settings and runs are of one length, so that further runs join these
    iterations = {row.iterations for row in run.summary.read(shipped).outcomes}
    assert iterations == {run.studies.load(EXAMPLES / "evidence_study").common["common"]["trainer"]["max_epochs"]}
    page = (EXAMPLES.parent / "docs" / "studies" / "evidence.md").read_text()
    (collapse,) = (one for one in csv_rows(shipped / "tests.csv") if one["arm"] == "s10+none+int4")
    assert f"−{-float(collapse['difference']):.3f} ± {float(collapse['standard_error']):.3f}" in page


def test_what_is_left_at_the_time_limit_is_stopped(run, jobs, monkeypatch, capsys):
    clock = iter([0.0] * 20)
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock, 100.0))
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
    started = []

    def start(job, gpu):
        started.append(job)
        return subprocess.Popen(["true"] if job is jobs[0] else ["sleep", "600"])

    monkeypatch.setattr(run, "start", start)
    assert run.run_until(jobs, 3, 50.0) == []
    assert started[:3] == jobs[:3]
    assert len(started) < len(jobs)
    assert "runs were stopped" in capsys.readouterr().out
    assert run.run_until(jobs, 3, 50.0) == []  # nothing is begun after it


def test_a_failed_run_is_named_and_finished_ones_are_left_alone(run, jobs, monkeypatch, capsys):
    finish(run, jobs[0], 0.5)
    started = []
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)

    def start(job, gpu):
        started.append(job)
        job.folder.mkdir(parents=True)
        (job.folder / "log.txt").write_text("It was like this.\n")
        return subprocess.Popen(["false"])

    monkeypatch.setattr(run, "start", start)
    failed = run.run_until(jobs[:3], 2, math.inf)  # in the order in which they end
    assert started == jobs[1:3] == sorted(failed, key=jobs.index)
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == printed.count("It was like this.") == 2


def test_tables_and_csvs_of_fake_runs(run, jobs, tmp_path, capsys, monkeypatch):
    for job in jobs:
        finish(run, job, LEARNER[job.arm] + 0.01 * job.seed * (job.arm == "s10+none+int4"), sampler=0.6)
    monkeypatch.setattr(run, "phases_of", lambda scale, quick: [run.Phase(tuple(LEARNER), range(3))])
    out = tmp_path / "out"
    assert run.main(["--out", str(out), "--report"]) == 0
    printed = capsys.readouterr().out
    rows = {row[0]: row for row in ([c.strip() for c in line.strip("|").split("|")] for line in printed.splitlines())}
    # the mean of the last four evaluations is 0.024 above the first
    assert rows["bf16 sampler"][1:4] == ["3", "0.924 ± 0", "0.6 ± 0"]
    assert rows["none"][4] == "-0.690 ± 0.0058"
    assert rows["none"][9] == "3 of 3"
    assert rows["tis"][9] == "0 of 3"
    assert rows["tis"][7].startswith("+0.490")
    assert rows["aligned"][4].startswith("-0.020")
    assert (out / "results" / "figure.png").read_bytes().startswith(b"\x89PNG")
    results = run.summary.read(out / "results")
    assert results.finished == {(job.arm, job.seed) for job in jobs}
    assert results.of("s10+none+int4")[1].learner_accuracy == pytest.approx(0.234)
    curve = [one for one in results.points if (one.arm, one.seed) == ("s10+none+bf16", 0)]
    assert [one.iteration for one in curve] == [0, 10, 20, 30, 40]
    assert curve[0].sampler_accuracy is None
    assert curve[1].sampler_accuracy == 0.6
    # what an earlier call has chosen and run is joined and not run again
    (out / "results" / "choice.json").write_text('{"rate": 0.0002, "scale": "s10"}')
    assert run.main(["--out", str(tmp_path / "other"), "--before", str(out / "results"), "--list"]) == 0
    assert capsys.readouterr().out == ""
    assert run.main(["--out", str(tmp_path / "other"), "--before", str(out / "results"), "--report"]) == 0
    assert (tmp_path / "other" / "results" / "runs.csv").read_text() == (out / "results" / "runs.csv").read_text()
    assert json.loads((jobs[0].folder / "command.json").read_text())["fingerprint"] == jobs[0].fingerprint
