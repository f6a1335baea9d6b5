"""The plots of a report: what each figure shows, and how one is drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_qrl.report import page
from lit_qrl.report.run import PHASES, Run, Seeds, Series, phase_series, takes_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet


Source = Run | Seeds
"""What a line is drawn of: a run, or several of one configuration."""

COLORS = ("#3b76e8", "#e8812c", "#2a9d77", "#9a63d8", "#d94f5c", "#20a0b8", "#c79a14", "#8a6a55")
"""Told apart with the usual kinds of colour blindness, and legible on white and on near-black."""
PHASE_COLORS = dict(zip(PHASES.values(), (*COLORS, "#b0569a", "#6b8e23", "#4a55b0"), strict=True))
REST_COLOR = "#98a1b2"
"""Of a phase that has no colour of its own."""

INK = {"paper": "#ffffff", "text": "#3a4150", "faint": "#8b93a1", "grid": "#e9ecf1", "edge": "#c9ced8"}
"""Of a light page; a dark one turns the picture's light around."""
DOTS_UP_TO = 40
"""Series with at most so many points also show the points."""
SMOOTH_FROM = 60
"""Series with at least so many points are drawn faintly under their running mean over a twentieth of them."""
RAW_SIGNALS = ("ess_ratio", "mean_abs_log_ratio", "amplification")
"""What AIS computes its signals from: in metrics.csv, not in the plots."""
MARKS_UP_TO = 30
"""More events than this are not marked in the plots."""
WIDTH_INCHES, ROW_INCHES = 10.0, 2.75
DPI = 160


@dataclass(frozen=True)
class Line:
    """One metric in a panel: its name and its legend."""

    metric: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Args:
        title: above the axes; carries the unit.
        lines: metrics to draw; in a comparison only the first that any run has.
        compared: whether a comparison shows the panel.
        stacked: draw the lines as a stack of areas.
        limits: smallest range of the vertical axis.
        log: logarithmic vertical axis where all values are positive.
    """

    title: str
    lines: tuple[Line, ...]
    stacked: bool = False
    limits: tuple[float | None, float | None] = (None, None)
    log: bool = False
    compared: bool = True


@dataclass(frozen=True)
class Figure:
    """One section of the report: an anchor, a heading, what to look for, and its panels."""

    key: str
    heading: str
    caption: str
    panels: tuple[Panel, ...] = ()


def figures_for(runs: Sequence[Source]) -> list[Figure]:
    """Return the figures for which the runs have data, with the panels and lines that have any."""
    chosen = []
    for figure in _catalogue(runs):
        panels = []
        for panel in figure.panels:
            lines = tuple(line for line in panel.lines if any(run.series(line.metric) for run in runs))
            if lines and (panel.compared or len(runs) == 1):
                panels.append(replace(panel, lines=lines))
        if panels:
            chosen.append(replace(figure, panels=tuple(panels)))
    return chosen


def draw(figure: Figure, runs: Sequence[Source], labels: Sequence[str]) -> bytes:
    """Return a figure's PNG: the lines of one run, or each panel's first for every run."""
    from matplotlib import rc_context

    with rc_context({"font.size": 9.0, "font.family": "sans-serif", "axes.unicode_minus": True}):
        sheet, all_axes = grid(len(figure.panels))
        for axes, panel in zip(all_axes, figure.panels, strict=True):
            first = panel.lines[0].label
            several = len(runs) > 1 and len(panel.lines) > 1 and first
            prepare(axes, f"{panel.title} ({first})" if several else panel.title)
            drawn = (
                _stack(axes, panel, runs[0]) if panel.stacked and len(runs) == 1 else _lines(axes, panel, runs, labels)
            )
            if len(runs) == 1 and isinstance(runs[0], Run):
                _mark_events(axes, runs[0])
            _finish(axes, panel, drawn)
            # In a comparison the colours mean the same in every panel.
            if len(runs) == 1 or axes is all_axes[0]:
                _legend(axes, panel.stacked and len(runs) == 1)
        return page.png_of(sheet)


def grid(count: int) -> "tuple[Sheet, list[Axes]]":
    """Return a sheet with room for `count` panels in rows of two or three, and their axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    columns = 3 if count == 3 or count > 4 else 2
    rows = math.ceil(count / columns)
    sheet = Sheet((WIDTH_INCHES, ROW_INCHES * rows), dpi=DPI, facecolor=INK["paper"], layout="constrained")
    sheet.get_layout_engine().set(h_pad=0.1 if rows > 1 else 0.04)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    FigureCanvasAgg(sheet)
    all_axes = list(sheet.subplots(rows, columns, squeeze=False).flatten())
    for spare in all_axes[count:]:
        spare.set_axis_off()
    return sheet, all_axes[:count]


def _catalogue(runs: Sequence[Source]) -> list[Figure]:
    def every(prefix: str, *known: str) -> tuple[Line, ...]:
        names = sorted({name for run in runs for name in run.prefixed(prefix)} - set(known))
        return tuple(Line(name, name.removeprefix(prefix).strip("_").replace("_", " ")) for name in names)

    parts = every("reward/", "reward/mean", "reward/std", "reward/unscored")
    best = tuple(Line(line.metric, f"pass@{line.label}") for line in every("val/pass@") if line.label.isdigit())
    benchmarks = {name: metrics for run in runs for name, metrics in run.benchmarks.items()}
    signals = ("alpha", "reliability", "necessity", "variance_penalty")
    ended = every("environment/ended")
    ended = tuple(line for line in ended if any(any(run.series(line.metric).values) for run in runs))
    weights = ("correction/weight_mean", "correction/weight_max")
    shares = tuple(
        line
        for line in every("correction/")
        if line.metric.endswith(("_tokens", "_sequences")) and "extreme" not in line.metric
    )
    known = {*weights, *(line.metric for line in shares), *(f"correction/{name}" for name in (*signals, *RAW_SIGNALS))}
    others = tuple(line for line in every("correction/") if line.metric not in known)
    stale = Line("mismatch/staleness_kl", "of it staleness", dashed=True)
    return [
        Figure(
            "learning",
            "Learning",
            "Mean reward of the rollouts, and accuracy on held-out problems that are never trained on. The sampler's "
            "accuracy is measured on the rollouts, in the sampler's format; the learner's in the evaluation.",
            (
                Panel("Reward", (Line("reward/mean", "mean"),)),
                Panel(
                    "Held-out accuracy",
                    (Line("val/accuracy", "sampled"), Line("val/greedy_pass@1", "greedy", dashed=True), *best),
                ),
                *(
                    (
                        Panel(
                            "Accuracy",
                            (
                                Line("rollout/accuracy", "sampler, rollouts"),
                                Line("val/accuracy", "learner, held-out"),
                            ),
                        ),
                    )
                    if any(run.series("rollout/accuracy") for run in runs)
                    else ()
                ),
                *(
                    Panel(
                        f"{name}, held-out accuracy",
                        tuple(
                            Line(metric, metric.rpartition("/")[2].replace("_", " "), dashed="greedy" in metric)
                            for metric in metrics
                        ),
                    )
                    for name, metrics in benchmarks.items()
                ),
                *((Panel("Parts of the reward", parts, compared=False),) if len(parts) > 1 else ()),
            ),
        ),
        Figure(
            "mismatch",
            "Mismatch between sampler and learner",
            "How far the policy that generates the tokens is from the one that is trained, before any correction. A "
            "rising KL or a falling effective sample size precedes a collapse.",
            (
                Panel(
                    "KL(sampler ‖ learner), nats",
                    (Line("mismatch/kl_k3", "k3"), Line("mismatch/kl_k1", "k1", dashed=True), stale),
                ),
                Panel(
                    "|log-ratio|, nats",
                    (Line("mismatch/abs_log_ratio", "mean"), Line("mismatch/log_ratio_p99", "99 %", dashed=True)),
                    limits=(0.0, None),
                ),
                Panel("E|Δp|, probability", (Line("mismatch/abs_prob_diff"),), limits=(0.0, None)),
                Panel("Effective sample size, ratio", (Line("mismatch/ess_ratio"),), limits=(None, 1.0)),
                Panel(
                    "Share of Σ|d|, by advantage and side",
                    every("mismatch/share_"),
                    limits=(0.0, 1.0),
                    compared=False,
                ),
                Panel("Age of the sampler's weights, iterations", (Line("rollout/age"),), limits=(0.0, None)),
            ),
        ),
        Figure(
            "correction",
            "Correction",
            "What the correction does about the mismatch: α mixes the uncorrected gradient (0) with the "
            "importance-weighted one (1); it is (reliability − variance penalty) × necessity."
            if any(run.series("correction/alpha") for run in runs)
            else "What the correction does about the mismatch: how large its weights are, how many tokens it reaches.",
            (
                Panel("α, strength of the correction", (Line("correction/alpha", "α"),), limits=(0.0, 1.0)),
                Panel(
                    "The signals behind α",
                    tuple(Line(f"correction/{name}", name.replace("_", " ")) for name in signals[1:]),
                    limits=(0.0, 1.0),
                    compared=False,
                ),
                Panel("Weight of a token", (Line(weights[0], "mean"), Line(weights[1], "largest", dashed=True))),
                Panel("Affected share", shares, limits=(0.0, None), compared=False),
                Panel("Other signals", others[:8], compared=False),
            ),
        ),
        Figure(
            "policy",
            "Policy",
            "An entropy of zero means that the policy has stopped exploring; a growing clip fraction, that updates "
            "leave the trust region.",
            (
                Panel("Entropy, nats per token", (Line("update/entropy"),), limits=(0.0, None)),
                Panel("Clip fraction", every("update/clip_fraction"), limits=(0.0, None)),
                Panel("Completion length, tokens", (Line("rollout/length"),), limits=(0.0, None)),
                Panel("Ended by themselves, share", (Line("rollout/stopped"),), limits=(0.0, 1.0)),
                Panel("Answers in a conversation", (Line("environment/turns"),), limits=(0.0, None)),
                Panel("How conversations ended, share", ended, limits=(0.0, 1.0), compared=False),
            ),
        ),
        Figure(
            "update",
            "Update",
            "The optimizer's view: the surrogate loss, the norm of the gradient before clipping, and how far one "
            "iteration moves the policy.",
            (
                Panel("Loss", (Line("update/loss"),)),
                Panel("Gradient norm", (Line("update/grad_norm"),), limits=(0.0, None)),
                Panel(
                    "KL to the previous learner, nats",
                    (Line("update/kl", "iteration before"), Line("update/reference_kl", "reference", dashed=True)),
                ),
                Panel("Noise σ", (Line("noise/sigma"),), log=True),
            ),
        ),
        Figure(
            "time",
            "Time",
            "Where the seconds of an iteration go, and how fast the sampler generates tokens.",
            (
                Panel(
                    "Seconds per iteration",
                    tuple(Line(f"time/{phase}", shown) for phase, shown in PHASES.items() if takes_time(runs[0], phase))
                    if len(runs) == 1
                    else (Line("time/iteration"),),
                    stacked=True,
                    limits=(0.0, None),
                ),
                Panel("Tokens per second", (Line("rollout/tokens_per_second"),), limits=(0.0, None)),
            ),
        ),
    ]


def prepare(axes: "Axes", title: str) -> None:
    """Give empty axes the look of the report."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor(INK["paper"])
    axes.set_title(title, loc="left", fontsize=9.5, color=INK["text"], pad=8)
    axes.grid(visible=True, color=INK["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(INK["edge"])
    axes.tick_params(colors=INK["faint"], labelcolor=INK["faint"], length=0, pad=4, labelsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    # The usual formatter moves a common part of the numbers to where the title is.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.7g}".replace("-", "−")))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _lines(axes: "Axes", panel: Panel, runs: Sequence[Source], labels: Sequence[str]) -> list[Series]:
    chosen: list[tuple[Source, Line, str]]
    if len(runs) == 1:
        chosen = [(runs[0], line, line.label) for line in panel.lines]
    else:
        chosen = [(run, panel.lines[0], label) for run, label in zip(runs, labels, strict=True)]
    drawn = []
    for index, (run, line, label) in enumerate(chosen):
        series = run.series(line.metric)
        if not series:
            continue
        drawn.append(series)
        style: dict[str, Any] = {"color": COLORS[index % len(COLORS)], "solid_capstyle": "round"}
        style["linestyle"] = "--" if line.dashed else ("-", "-.", ":")[index // len(COLORS) % 3]
        x, y = series.iterations, series.values
        low, high = run.interval(line.metric)
        if low.iterations == high.iterations == x:
            axes.fill_between(x, low.values, high.values, color=style["color"], alpha=0.12, linewidth=0)
        if len(y) >= SMOOTH_FROM:
            axes.plot(x, y, linewidth=0.8, alpha=0.28, color=style["color"])
            axes.plot(x, running_mean(y, max(len(y) // 20, 3)), linewidth=1.9, label=label, **style)
        else:
            marker = {"marker": "o", "markersize": 3.2} if len(y) <= DOTS_UP_TO else {}
            axes.plot(x, y, linewidth=1.7, label=label, **marker, **style)
    return drawn


def _stack(axes: "Axes", panel: Panel, run: Source) -> list[Series]:
    series = [(line, phase_series(run, line.metric.removeprefix("time/"))) for line in panel.lines]
    iterations = sorted({i for _, one in series for i in one.iterations})
    heights = []
    for _, one in series:
        values = dict(zip(one.iterations, one.values, strict=True))
        heights.append([values.get(i, 0.0) for i in iterations])
    colors = [PHASE_COLORS.get(line.label, REST_COLOR) for line, _ in series]
    edges = [i - 0.5 for i in (*iterations, iterations[-1] + 1)]
    total = [0.0] * len(iterations)
    for (line, _), height, color in zip(series, heights, colors, strict=True):
        floor, total = total, [a + b for a, b in zip(total, height, strict=True)]
        axes.stairs(total, edges, baseline=floor, fill=True, color=color, label=line.label, linewidth=0)
    # One slow iteration, such as an evaluation, would press all others to the ground.
    usual = sorted(total)[int(0.9 * (len(total) - 1))]
    # The rest of the height is room for the legend.
    axes.set_ylim(
        0, (1.2 + 0.1 * math.ceil(len(series) / 4)) * (max(total) if max(total) <= 3 * usual else 1.3 * usual) or None
    )
    return [Series(iterations, total)]


def _finish(axes: "Axes", panel: Panel, drawn: Sequence[Series]) -> None:
    low, high = panel.limits
    values = [value for series in drawn for value in series.values]
    if panel.log and values and min(values) > 0:
        axes.set_yscale("log")
    elif values and (low is not None or high is not None) and not axes.patches and not axes.collections:
        bottom = min(values if low is None else [low, *values])
        top = max(values if high is None else [high, *values])
        if top == bottom:  # at its limit all along: the axis goes to where it may go, not beyond the limit
            bottom, top = (bottom, bottom + 1) if low is not None else (top - 1, top)
        margin = 0.05 * (top - bottom)
        axes.set_ylim(bottom - margin, top + margin)
    axes.set_xlabel("iteration", fontsize=8, color=INK["faint"])
    points = sorted({i for series in drawn for i in series.iterations})
    if len(points) == 1:
        axes.set_xlim(points[0] - 1, points[0] + 1)


def _legend(axes: "Axes", above: bool) -> None:
    handles, names = axes.get_legend_handles_labels()
    if len([name for name in names if name]) < 2:
        return
    columns = min(len(names), 4) if above else 2 if len(names) > 4 else 1
    axes.legend(
        handles, names, fontsize=7.5, labelcolor=INK["text"], ncols=columns, loc="upper left" if above else "best",
        facecolor=INK["paper"], edgecolor="none", framealpha=0.75, handlelength=1.3, handletextpad=0.5,
        columnspacing=1.0, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip


def _mark_events(axes: "Axes", run: Run) -> None:
    quiet = ("start", "finish", "resume", "report", "checkpoint", "sampler", "update")
    marks = {event.get("iteration") for event in run.events if event.get("kind") not in quiet}
    marks = {mark for mark in marks if isinstance(mark, int) and 0 < mark <= max(run.iterations, 1)}
    if len(marks) <= MARKS_UP_TO:
        for mark in marks:
            axes.axvline(mark, color=INK["faint"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Return the mean over a centred window that shrinks at both ends.

    >>> running_mean([0.0, 3.0, 6.0], 3)
    [1.5, 3.0, 4.5]
    """
    window = np.ones(width // 2 * 2 + 1)
    sums, counts = (np.convolve(one, window, "same") for one in (values, np.ones(len(values))))
    return (sums / counts).tolist()


def draw_histograms(histograms: list[dict[str, Any]]) -> bytes:
    """Return the PNG of all histograms, side by side."""
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm

    with rc_context({"font.size": 9.0, "font.family": "sans-serif"}):
        sheet, all_axes = grid(len(histograms))
        for axes, one in zip(all_axes, histograms, strict=True):
            prepare(axes, str(one.get("title", "")))
            x, counts = one["x"]["edges"], one["counts"]
            if isinstance(counts, dict):
                for color, (name, heights) in zip(COLORS, counts.items(), strict=False):
                    axes.stairs(heights, x, color=color, fill=True, alpha=0.35)
                    axes.stairs(heights, x, color=color, linewidth=1.4, label=str(name))
                if one.get("scale") != "linear":
                    axes.set_yscale("symlog", linthresh=1)
                if len(counts) > 1:
                    axes.legend(fontsize=7.5, labelcolor=INK["text"], frameon=False)
            else:
                mesh = [[value or math.nan for value in column] for column in zip(*counts, strict=True)]
                most = max((v for column in mesh for v in column if v == v), default=1.0)
                axes.pcolormesh(x, one["y"]["edges"], mesh, norm=LogNorm(1, max(most, 2)), cmap="viridis")
                axes.set_ylabel(str(one["y"].get("label", "")), fontsize=8, color=INK["faint"])
            for position in one.get("lines") or ():
                axes.axvline(position, color=INK["faint"], linewidth=1.0, linestyle="--")
            axes.set_xlabel(str(one["x"].get("label", "")), fontsize=8, color=INK["faint"])
        return page.png_of(sheet)
