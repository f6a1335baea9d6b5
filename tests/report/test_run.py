import csv
import json
import math

import pytest

from lit_qrl.report.run import Run, Series, phase_series, read_metrics, where_time_went


def write_csv(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return Run(folder)


def test_series_counts_iterations_from_one(tmp_path):
    run = write_csv(tmp_path, [{"epoch": e, "step": e, "reward/mean": e / 4} for e in range(3)])
    assert run.series("reward/mean") == Series([1, 2, 3], [0.0, 0.25, 0.5])
    assert run.iterations == 3
    assert (run.series("reward/mean").first, run.series("reward/mean").last) == (0.0, 0.5)
    assert run.series("reward/mean").mean == 0.25


def test_several_rows_of_an_iteration_become_their_mean(tmp_path):
    rows = [{"epoch": 0, "step": 0, "update/loss": 1.0}, {"epoch": 0, "step": 1, "update/loss": 3.0}]
    assert write_csv(tmp_path, rows).series("update/loss") == Series([1], [2.0])


def test_non_finite_values_are_left_out_and_counted_nowhere(tmp_path):
    values = [0.5, math.nan, math.inf, 1.0]
    run = write_csv(tmp_path, [{"epoch": e, "step": e, "a": v, "b": math.nan} for e, v in enumerate(values)])
    assert run.series("a") == Series([1, 4], [0.5, 1.0])
    assert not run.series("b")
    assert run.names == ["a"]
    assert run.series("b").mean is None
    assert run.series("b").minimum is None


@pytest.mark.parametrize(
    "rows, expected",
    [
        # Two optimizer steps an iteration: the first evaluation stands at an earlier step.
        ([("v", 0, 0), ("t", 0, 1), ("t", 1, 3), ("v", 2, 5), ("t", 2, 5)], [0, 3]),
        # One step an iteration, evaluated before and after each.
        ([("v", 0, 0), ("v", 0, 0), ("t", 0, 0), ("v", 1, 1), ("t", 1, 1)], [0, 1, 2]),
        # One step an iteration, evaluated before, then every third.
        ([("v", 0, 0), ("t", 0, 0), ("t", 1, 1), ("v", 2, 2), ("t", 2, 2), ("v", 5, 5)], [0, 3, 6]),
        # One step an iteration, evaluated after each, not before.
        ([("v", 0, 0), ("t", 0, 0), ("v", 1, 1), ("t", 1, 1), ("v", 2, 2)], [1, 2, 3]),
        # Nothing but the first evaluation.
        ([("v", 0, 0)], [0]),
        # A resumed run without the beginning.
        ([("v", 14, 14), ("t", 14, 14), ("v", 29, 29)], [15, 30]),
    ],
)
def test_the_evaluation_before_training_stands_at_zero(tmp_path, rows, expected):
    names = {"v": "val/accuracy", "t": "reward/mean"}
    run = write_csv(tmp_path, [{"epoch": e, "step": s, names[kind]: 0.5 + e / 100} for kind, e, s in rows])
    assert run.series("val/accuracy").iterations == expected


def test_a_file_cut_within_a_line_loses_that_line_only(make_run):
    folder = make_run(iterations=5)
    path = folder / "metrics.csv"
    whole = read_metrics(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_metrics(path) == whole[:-1]
    for name in ("samples.jsonl", "events.jsonl"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) - 15])
    run = Run(folder)
    assert len(run.samples) == 14
    assert run.status == "running"


@pytest.mark.parametrize(
    "content",
    [b"", b"epoch,step\n", b"epoch,st", b"\0\0\0\n\xff\xfe,\n", b"epoch,step,a\n0,0,x\n1,1\n2,2,3,4,5\nnan,1,2\n"],
)
def test_odd_files_are_no_error(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    (tmp_path / "config.yaml").write_text("a: [unclosed")
    (tmp_path / "publish.json").write_text('{"layers": 3}')
    (tmp_path / "histograms.json").write_text("[")
    run = Run(tmp_path)
    assert run.config == {}
    assert run.layers == {}
    assert run.format is None
    assert run.correction is None
    assert run.status == "unknown"
    assert run.seconds is None
    assert run.series("a").values in ([], [3.0])


def test_the_format_is_what_the_sampler_loaded(make_run):
    folder = make_run()
    assert Run(folder).format == "fp8_tensor"
    (folder / "publish.json").write_text(json.dumps({"layers": {"a": "int4_group", "b": "bf16", "c": "bf16"}}))
    assert Run(folder).format == "int4_group"
    (folder / "publish.json").unlink()
    assert Run(folder).format is None


@pytest.mark.parametrize(
    "kinds, status",
    [
        (["start", "finish"], "finished"),
        (["start", "interrupt"], "interrupted"),
        (["start", "guard", "exception", "report"], "failed"),
        (["start", "interrupt", "resume", "guard"], "running"),
        ([], "unknown"),
    ],
)
def test_status_is_the_last_word_of_the_diary(tmp_path, kinds, status):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in kinds))
    assert Run(tmp_path).status == status


def test_seconds_leave_out_the_pause_between_sessions(tmp_path):
    moments = [("start", 100), ("interrupt", 110), ("resume", 5000), ("finish", 5007)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"kind": k, "time": t}) + "\n" for k, t in moments))
    assert Run(tmp_path).seconds == 17
    # A run that was started again in the same folder is another run.
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "start", "time": 9000}) + "\n" + json.dumps({"kind": "finish", "time": 9003}) + "\n"
        )
    assert Run(tmp_path).seconds == 3


def test_a_numbered_folder_is_named_with_its_parent(tmp_path):
    assert Run(tmp_path / "quickstart" / "3").name == "quickstart/3"
    assert Run(tmp_path / "mine").name == "mine"


def test_benchmarks_and_their_intervals(tmp_path):
    names = ["greedy_pass@1", "pass@1", "pass@16"]
    row = {f"val/math/{name}{bound}": 0.5 for name in names for bound in ("", "_ci_low", "_ci_high")}
    run = write_csv(tmp_path, [{"epoch": 0, "step": 0, **row, "val/own/thing": 1.0}])
    assert run.benchmarks["math"] == ["val/math/pass@1", "val/math/pass@16", "val/math/greedy_pass@1"]
    assert run.accuracy.values == [0.5]
    assert [end.values for end in run.interval("val/math/pass@1")] == [[0.5], [0.5]]
    assert run.interval("val/own/thing") == (Series(), Series())


def timed(folder, rows):
    phases = [{f"time/{name}": seconds for name, seconds in row.items()} for row in rows]
    return write_csv(folder, [{"epoch": i, "step": i, **row} for i, row in enumerate(phases)])


ROWS = [
    {"iteration": 10.0, "rollout": 6.0, "generate": 4.0, "reward": 1.5, "update": 2.0, "checkpoint": 1.0, "report": 0.5,
     "sleep": 0.25, "other": 0.25, "verify": 0.1},
    {"iteration": 5.0, "rollout": 3.0, "generate": 2.0, "reward": 1.0, "update": 2.0, "checkpoint": 0.0, "report": 0.0,
     "sleep": 0.0, "other": 0.0, "verify": 0.1},
]  # fmt: skip


def test_phases_add_up_to_the_run(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind": "start", "time": 100}\n{"kind": "finish", "time": 120}\n')
    phases = {phase.name: phase for phase in where_time_went(timed(tmp_path, ROWS))}
    assert {name: phase.seconds for name, phase in phases.items()} == {
        "generate": 6.0, "reward": 2.5, "rollout, the rest": 0.5, "wait for the engine's sleep": 0.25, "update": 4.0,
        "checkpoint": 1.0, "report": 0.5, "other": 0.25, "outside of iterations": 5.0,
    }  # fmt: skip
    assert sum(phase.share for phase in phases.values()) == pytest.approx(1.0)
    assert (phases["checkpoint"].mean, phases["checkpoint"].most, phases["checkpoint"].iteration) == (0.5, 1.0, 1)


def test_a_phase_of_another_version_is_named_and_a_negative_rest_is_none(tmp_path):
    rows = [{"iteration": 2.0, "stage_weights": 1.5, "other": -0.7, "update": 0.5}]
    assert [phase.name for phase in where_time_went(timed(tmp_path, rows))] == ["update", "stage weights"]
    assert phase_series(Run(tmp_path), "other").values == [0.0]


def test_no_phases_no_table(tmp_path):
    assert where_time_went(Run(tmp_path)) == []
    (tmp_path / "metrics.csv").write_text("epoch,step,time/iteration\n0,0,1\n")
    assert where_time_went(Run(tmp_path)) == []
