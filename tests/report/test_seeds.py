import json
import statistics

import pytest

from lit_qrl.report.run import Run, Seeds, Series, by_configuration, standard_error

VALUES = [[0.5, 1.0, 2.0], [1.5, 4.0, 9.0], [1.0, 2.5]]


@pytest.fixture
def runs(tmp_path):
    for number, values in enumerate(VALUES):
        folder = tmp_path / str(number)
        folder.mkdir()
        extra = ",a/only" if number == 0 else ""
        rows = "".join(f"{i},{i},{value}{',7' if extra else ''}\n" for i, value in enumerate(values))
        (folder / "metrics.csv").write_text(f"epoch,step,reward/mean{extra}\n{rows}")
    return [Run(tmp_path / str(number)) for number in range(3)]


def test_mean_and_band_at_the_iterations_that_all_have(runs):
    together = Seeds(runs)
    mean, (low, high) = together.series("reward/mean"), together.interval("reward/mean")
    columns = [[values[i] for values in VALUES] for i in range(2)]
    assert mean.iterations == low.iterations == high.iterations == [1, 2]
    assert mean.values == pytest.approx([statistics.mean(column) for column in columns])
    errors = [statistics.stdev(column) / 3**0.5 for column in columns]
    assert [h - m for h, m in zip(high.values, mean.values, strict=True)] == pytest.approx(errors)
    assert [m - value for value, m in zip(low.values, mean.values, strict=True)] == pytest.approx(errors)
    assert standard_error([3.0, 3.0]) == 0.0


def test_a_metric_of_one_run_has_no_band(runs):
    assert Seeds(runs).series("a/only").values == [7.0, 7.0, 7.0]
    assert Seeds(runs).interval("a/only") == (Series(), Series())
    assert Seeds(runs).series("none") == Series()
    assert Seeds(runs).prefixed("a/") == ["a/only"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"seed_everything": 5}, True),
        ({"trainer": {"max_epochs": 3, "default_root_dir": "elsewhere"}}, True),
        ({"data": {"seed": 9, "task": {"init_args": {"seed": 0}}}}, True),
        ({"data": {"seed": None, "task": {"init_args": {"seed": 1}}}}, False),
        ({"trainer": {"max_epochs": 4, "default_root_dir": "here"}}, False),
        ({"new": 1}, False),
    ],
)
def test_runs_of_one_configuration_belong_together(tmp_path, change, same):
    config = {"seed_everything": 0, "trainer": {"max_epochs": 3, "default_root_dir": "here"},
              "data": {"seed": None, "task": {"init_args": {"seed": 0}}}}  # fmt: skip
    for name, one in (("a", config), ("b", {**config, **change})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps(one))
    found = by_configuration([Run(tmp_path / "a"), Run(tmp_path / "b")])
    assert found == ([[0, 1]] if same else [[0], [1]])


def test_runs_without_a_configuration_stand_alone(runs):
    assert by_configuration(runs) == [[0], [1], [2]]
