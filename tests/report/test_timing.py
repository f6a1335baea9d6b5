import pytest

from lit_qrl.report.run import Run, phase_series, where_time_went


def write(folder, rows, events=""):
    names = list(rows[0])
    lines = [",".join(["epoch", "step", *(f"time/{name}" for name in names)])]
    lines += [",".join(map(str, [i, i, *row.values()])) for i, row in enumerate(rows)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "events.jsonl").write_text(events)
    return Run(folder)


ROWS = [
    {"iteration": 10.0, "rollout": 6.0, "generate": 4.0, "reward": 1.5, "update": 2.0, "checkpoint": 1.0, "report": 0.5,
     "sleep": 0.25, "other": 0.25, "verify": 0.1},
    {"iteration": 5.0, "rollout": 3.0, "generate": 2.0, "reward": 1.0, "update": 2.0, "checkpoint": 0.0, "report": 0.0,
     "sleep": 0.0, "other": 0.0, "verify": 0.1},
]  # fmt: skip


def test_phases_add_up_to_the_run(tmp_path):
    events = '{"kind": "start", "time": 100}\n{"kind": "finish", "time": 120}\n'
    phases = {phase.name: phase for phase in where_time_went(write(tmp_path, ROWS, events))}
    assert {name: phase.seconds for name, phase in phases.items()} == {
        "generate": 6.0, "reward": 2.5, "rollout, the rest": 0.5, "wait for the engine's sleep": 0.25, "update": 4.0,
        "checkpoint": 1.0, "report": 0.5, "other": 0.25, "outside of iterations": 5.0,
    }  # fmt: skip
    assert sum(phase.share for phase in phases.values()) == pytest.approx(1.0)
    assert (phases["checkpoint"].mean, phases["checkpoint"].most, phases["checkpoint"].iteration) == (0.5, 1.0, 1)


def test_a_phase_of_another_version_is_named_and_a_negative_rest_is_none(tmp_path):
    rows = [{"iteration": 2.0, "stage_weights": 1.5, "other": -0.7, "update": 0.5}]
    assert [phase.name for phase in where_time_went(write(tmp_path, rows))] == ["update", "stage weights"]
    assert phase_series(Run(tmp_path), "other").values == [0.0]


def test_no_phases_no_table(tmp_path):
    assert where_time_went(Run(tmp_path)) == []
    (tmp_path / "metrics.csv").write_text("epoch,step,time/iteration\n0,0,1\n")
    assert where_time_went(Run(tmp_path)) == []
