import io
import struct

import pytest

from lit_qrl.report.figures import Panel, _finish, draw, figures_for, grid
from lit_qrl.report.run import Run, Seeds, Series


def keys(runs):
    return [figure.key for figure in figures_for(runs)]


def size_of(png):
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def pixels(png):
    from matplotlib.image import imread

    return imread(io.BytesIO(png))


def write(folder, text):
    (folder / "metrics.csv").write_text(text)
    return Run(folder)


def test_a_whole_run_has_all_figures(make_run):
    run = Run(make_run())
    assert keys([run]) == ["learning", "mismatch", "correction", "policy", "update", "time"]
    panels = {figure.key: [panel.title for panel in figure.panels] for figure in figures_for([run])}
    assert len(panels["mismatch"]) == 5
    assert panels["correction"] == ["α, strength of the correction", "The signals behind α"]


SHARES = {"turns": 1.5, "ended_done": 0.9, "ended_error": 0, "ended_time": 0.1}
BENCHMARKS = ("accuracy", "pass@4", "math/pass@1", "math/greedy_pass@1")
LOGGED = {
    "only what was logged": ({"reward/mean": 0.5, "mismatch/kl_k3": "nan"}, "metric", {"Reward": ["reward/mean"]}),
    "signals of another correction": (
        {"correction/my_signal": 0.1, "correction/rejected_tokens": 0.2, "correction/weight_mean": 0.9},
        "metric",
        {
            "Weight of a token": ["correction/weight_mean"],
            "Affected share": ["correction/rejected_tokens"],
            "Other signals": ["correction/my_signal"],
        },
    ),
    "what of a mismatch is staleness": (
        {"mismatch/kl_k3": 0.004, "mismatch/staleness_kl": 0.003, "rollout/age": 1},
        "metric",
        {
            "KL(sampler ‖ learner), nats": ["mismatch/kl_k3", "mismatch/staleness_kl"],
            "Age of the sampler's weights, iterations": ["rollout/age"],
        },
    ),
    "conversations": (  # no line lies under another for what never happened
        {f"environment/{name}": share for name, share in SHARES.items()},
        "label",
        {"Answers in a conversation": [""], "How conversations ended, share": ["done", "time"]},
    ),
    "benchmarks": (  # of which each gets its panel, and intervals are no lines
        {f"val/{name}{bound}": 0.5 for name in BENCHMARKS for bound in ("", "_ci_low", "_ci_high")},
        "label",
        {"Held-out accuracy": ["sampled", "pass@4"], "math, held-out accuracy": ["pass@1", "greedy pass@1"]},
    ),
}


@pytest.mark.parametrize("what", LOGGED)
def test_what_was_logged_is_drawn(tmp_path, what):
    row, name, panels = LOGGED[what]
    run = write(tmp_path, f"epoch,step,{','.join(row)}\n0,0,{','.join(map(str, row.values()))}\n")
    (figure,) = figures_for([run])
    assert {panel.title: [getattr(line, name) for line in panel.lines] for panel in figure.panels} == panels
    assert draw(figure, [run], ["run"])


@pytest.mark.parametrize("limits, value, shown", [((0.0, None), 0.0, (0, 1)), ((None, 1.0), 1.0, (0, 1))])
def test_a_share_that_stays_at_its_limit_has_no_axis_beyond_it(limits, value, shown):
    _, (axes,) = grid(1)
    axes.plot([1, 2], [value, value])
    _finish(axes, Panel("", (), limits=limits), [Series([1, 2], [value, value])])
    assert axes.get_ylim() == pytest.approx((shown[0] - 0.05, shown[1] + 0.05))


@pytest.mark.parametrize("iterations", [1, 3, 70])
def test_drawing_at_any_length_of_run(make_run, iterations):
    run = Run(make_run(iterations=iterations))
    for figure in figures_for([run])[:: 5 if iterations > 1 else 1]:
        image = draw(figure, [run], ["run"])
        assert size_of(image) == (1600, 440 if len(figure.panels) <= 3 else 880)
        assert pixels(image)[0, 0, :3] == pytest.approx((1.0, 1.0, 1.0), abs=0.01)


def test_drawing_nan_and_huge_values(tmp_path):
    rows = "0,0,1e300,inf,0\n1,1,nan,nan,0\n2,2,-1e300,1e-300,0\n"
    run = write(tmp_path, "epoch,step,reward/mean,mismatch/kl_k3,time/rollout\n" + rows)
    for figure in figures_for([run]):
        assert draw(figure, [run], ["a"])


def test_a_comparison_draws_one_line_per_run(make_run):
    runs = [Run(make_run(name, seed=i, correction=name)) for i, name in enumerate(("AIS", "none"))]
    figures = figures_for(runs)
    titles = [panel.title for figure in figures for panel in figure.panels]
    assert "Parts of the reward" not in titles
    assert "The signals behind α" not in titles
    one, two = (draw(figures[0], chosen, [r.name for r in chosen]) for chosen in (runs[:1], runs))
    assert (pixels(one) != pixels(two)).any()


def test_the_users_matplotlib_is_left_alone(make_run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    run = Run(make_run(iterations=1))
    draw(figures_for([run])[0], [run], ["a"])
    assert dict(matplotlib.rcParams) == before


def test_seeds_are_drawn_as_a_band(make_run):
    runs = [Run(make_run(str(seed), seed=seed)) for seed in (0, 1, 2)]
    together, alone = Seeds(runs), Seeds(runs[:1])
    figure = figures_for([together])[1]
    one, band = (draw(figure, [source], ["a"]) for source in (alone, together))
    assert (pixels(one) != pixels(band)).any()


def test_a_phase_that_takes_no_time_is_no_bar(tmp_path):
    run = write(tmp_path, "epoch,step,time/iteration,time/update,time/checkpoint,time/score\n0,0,1,0.5,0.2,0.0001\n")
    (figure,) = (one for one in figures_for([run]) if one.key == "time")
    assert [line.label for line in figure.panels[0].lines] == ["update", "checkpoint"]
    assert draw(figure, [run], ["a"])
