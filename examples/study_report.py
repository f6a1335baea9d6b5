"""The table, the verdict on its power, and the figure of a study."""

import io
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from lit_qrl.report.figures import COLORS, INK, SMOOTH_FROM, prepare, running_mean
from lit_qrl.report.run import Run, Series

if TYPE_CHECKING:
    from study import Study

Result = tuple[str, int, Run]
"""Arm, seed, run."""

BY_POSITION = {"position": "Mismatch by position", "kl_position": "KL by position"}
"""Titles of the monitor's curves along the completion, at the end of a run."""
PANELS = ("accuracy", "reward/mean", "mismatch/kl_k3", "mismatch/ess_ratio", "mismatch/weight_cv")
TITLES = {
    "accuracy": "Held-out accuracy",
    "reward/mean": "Reward",
    "mismatch/kl_k3": "KL(sampler ‖ learner), nats",
    "mismatch/abs_log_ratio": "Mean |log-ratio|, nats",
    "mismatch/ess_ratio": "Effective sample size, ratio",
    "mismatch/weight_cv": "CV of the weights",
    "update/kl": "Update KL, nats",
    "update/entropy": "Entropy, nats",
    "mismatch/log_ratio_p99": "|log-ratio|, 99 %, nats",
    "mismatch/ratio_max": "Largest ratio of an iteration",
    "routing/free_kl_k3": "KL with the learner's own routes, nats",
    "routing/replayed_kl_k3": "KL with the sampler's routes, nats",
    "position": "Mean |log-ratio| by position",
    "kl_position": "KL by position, nats",
}
LOGARITHMIC = {"mismatch/kl_k3", "mismatch/abs_log_ratio", "mismatch/log_ratio_p99", "mismatch/weight_cv", "update/kl"}
LOGARITHMIC |= {"mismatch/ratio_max", "routing/free_kl_k3", "routing/replayed_kl_k3", *BY_POSITION}
PHASES = ("rollout", "score", "update")
COLUMNS = (
    "Arm", "Seeds", "Accuracy", "greedy", "learner", "against baseline", "detectable",
    "Reward, first third", "last third", "KL, nats", "mean abs. log-ratio", "lowest ESS", "weight CV", "update KL",
    "entropy, last third", *(f"{phase} s" for phase in PHASES),
)  # fmt: skip
ROUTING = {
    "routing/free_kl_k3": "KL, own routes",
    "routing/replayed_kl_k3": "KL, replayed",
    "routing/free_differing_tokens": "tokens elsewhere",
}
"""Columns of studies whose runs compare scores with and without the sampler's experts."""
PANEL_INCHES = (3.1, 2.5)

# Quantiles of Student's t at 0.975 and 0.8 by degrees of freedom: together, in standard errors, the difference that a
# two-sided test at 5 % finds with a probability of 80 %.
T_QUANTILES = (
    (12.706, 1.376), (4.303, 1.061), (3.182, 0.978), (2.776, 0.941), (2.571, 0.920), (2.447, 0.906), (2.365, 0.896),
    (2.306, 0.889), (2.262, 0.883),
)  # fmt: skip
NORMAL_QUANTILES = (1.960, 0.842)


def write_report(study: "Study", results: Sequence[Result], planned: int, out: Path, changed: int = 0) -> str:
    """Write `table.md` and `figure.png` into `out` and return the table's text.

    Args:
        study: names arms, baseline, groups and power.
        results: the finished runs.
        planned: how many runs there should be.
        out: folder to write into.
        changed: runs of another configuration in the folders of these.
    """
    lines = [f"# {study.name}", "", f"{len(results)} of {planned} runs finished."]
    if changed:
        holds = "1 folder holds a run" if changed == 1 else f"{changed} folders hold runs"
        given = "give the arguments after `--` that they were made with."
        lines[-1] += f" {holds} of another configuration, which is not counted: {given}"
    lines += ["", *table(study, results), "", *verdict(study, results)]
    text = "\n".join(lines).rstrip() + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text)
    if results:
        draw(study, results, out / "figure.png")
    return text


def table(study: "Study", results: Sequence[Result]) -> list[str]:
    """Return the lines of the Markdown table: for each arm means over seeds ± standard errors."""
    runs = by_arm(results)
    split = {key: name for key, name in ROUTING.items() if any(run.series(key).values for _, _, run in results)}
    rows = []
    for arm in (arm for arm in study.arms if arm in runs):
        all_of = list(runs[arm].values())
        gap = differences(runs, arm, study.baseline) if arm != study.baseline else []
        lowest = [run.series("mismatch/ess_ratio").minimum for run in all_of]
        rows.append(
            [
                arm,
                str(len(all_of)),
                spread([run.accuracy.last for run in all_of]),
                spread([run.series("val/greedy_pass@1").last for run in all_of]),
                spread([of_learner(run) for run in all_of]),
                spread(gap, signed=True),
                "–" if len(gap) < 2 else number(detectable(gap)),
                spread([third(run.series("reward/mean"), 0) for run in all_of]),
                spread([third(run.series("reward/mean"), 2) for run in all_of]),
                spread([run.series("mismatch/kl_k3").mean for run in all_of]),
                spread([run.series("mismatch/abs_log_ratio").mean for run in all_of]),
                number(min((low for low in lowest if low is not None), default=None)),
                spread([run.series("mismatch/weight_cv").mean for run in all_of]),
                spread([run.series("update/kl").mean for run in all_of]),
                spread([third(run.series("update/entropy"), 2) for run in all_of]),
                *(mean_of([run.series(f"time/{phase}").mean for run in all_of]) for phase in PHASES),
                *(spread([run.series(key).mean for run in all_of]) for key in split),
            ]
        )  # fmt: skip
    columns = [*COLUMNS, *split.values()]
    return ["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)]


def verdict(study: "Study", results: Sequence[Result]) -> list[str]:
    """Return what the columns mean, and whether the study could have found what it looks for."""
    lines = [
        "Accuracy: sampled, on held-out problems, at the end of the run; learner: of the same weights in the learner's "
        "own dtype. ± is the standard error over seeds. Against "
        "baseline: mean of the differences seed by seed; detectable: the difference that such a comparison finds with "
        "a probability of 80 % (two-sided, 5 %). KL and the rest of the mismatch: means over iterations.",
    ]
    power = study.power
    if not power:
        return lines
    runs = by_arm(results)
    arm, wanted_loss, wanted_ratio = power["arm"], power["accuracy_loss"], power["abs_log_ratio"]
    gap = differences(runs, arm, study.baseline)
    ratios = [max(run.series("mismatch/abs_log_ratio").values, default=0.0) for run in runs.get(arm, {}).values()]
    if not gap or not ratios:
        return [*lines, "", f"Power: unknown until {arm} and {study.baseline} have finished on a common seed."]
    loss, ratio = -fmean(gap), max(ratios)
    line = (
        f"Power: {arm} loses {spread([-value for value in gap])} of accuracy against {study.baseline} (wanted: "
        f"{wanted_loss}), and its mean |log-ratio| of an iteration reaches {ratio:.3g} (wanted: {wanted_ratio}). "
    )
    if loss >= wanted_loss:
        line += "The study can tell corrections apart."
    elif ratio >= wanted_ratio:
        line += "There is a mismatch to act on, but what it costs in accuracy is less than the study was made to see."
    else:
        line += "The study has no power: at this scale the mismatch does too little harm to tell corrections apart."
    return [*lines, "", line]


def by_arm(results: Sequence[Result]) -> dict[str, dict[int, Run]]:
    """Return the runs by arm and seed."""
    runs: dict[str, dict[int, Run]] = {}
    for arm, seed, run in results:
        runs.setdefault(arm, {})[seed] = run
    return runs


def differences(runs: dict[str, dict[int, Run]], arm: str, baseline: str | None) -> list[float]:
    """Return the final accuracy of an arm minus the baseline's, for the seeds that both have."""
    ours, theirs = runs.get(arm, {}), runs.get(baseline or "", {})
    pairs = [(ours[seed].accuracy.last, theirs[seed].accuracy.last) for seed in sorted(ours.keys() & theirs.keys())]
    return [a - b for a, b in pairs if a is not None and b is not None]


def of_learner(run: Run) -> float | None:
    """Return the accuracy of a run's weights as they were evaluated after it, unquantized; None where they were not."""
    found = sorted((run.folder / "validate").glob("*"))
    return Run(found[-1]).accuracy.last if found else None


def third(series: Series, which: int) -> float | None:
    """Return the mean over the first (0), second (1) or last (2) third of a series."""
    n = len(series.values)
    part = series.values[which * n // 3 : (which + 1) * n // 3]
    return fmean(part) if part else None


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, NaN of a single value.

    >>> round(standard_error([1.0, 2.0, 3.0]), 4)
    0.5774
    """
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def detectable(gap: Sequence[float]) -> float:
    """Return the mean difference that a paired t-test (two-sided, 5 %) finds with a probability of 80 %.

    >>> round(detectable([0.0, 0.1, 0.2]), 3)
    0.31
    """
    freedom = len(gap) - 1
    quantiles = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else NORMAL_QUANTILES
    return sum(quantiles) * standard_error(gap)


def number(value: float | None, signed: bool = False) -> str:
    """Return a number with three digits, a dash for none.

    >>> number(0.012345), number(0.5, signed=True), number(None)
    ('0.0123', '+0.5', '–')
    """
    return "–" if value is None else f"{value:{'+' if signed else ''}.3g}"


def mean_of(values: Sequence[float | None]) -> str:
    """Return the mean of what is there, in figures."""
    known = [value for value in values if value is not None]
    return number(fmean(known)) if known else "–"


def spread(values: Sequence[float | None], signed: bool = False) -> str:
    """Return mean ± standard error of what is there.

    >>> spread([0.5, 0.6, None])
    '0.55 ± 0.05'
    """
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = number(fmean(known), signed)
    return f"{mean} ± {standard_error(known):.2g}" if len(known) > 1 else mean


def curve(run: Run, panel: str) -> tuple[list[float], list[float]]:
    """Return the points of one run in one panel."""
    if panel in BY_POSITION:
        listed = run.histograms.get("histograms") or []
        for one in (one for one in listed if one.get("title") == BY_POSITION[panel]):
            edges, heights = one["x"]["edges"], next(iter(one["counts"].values()))
            # bins between two tokens, and tokens that nothing but one can follow, have none
            known = [((a + b) / 2, y) for (a, b), y in zip(pairwise(edges), heights, strict=True) if y > 0]
            return [x for x, _ in known], [y for _, y in known]
        return [], []
    series = run.accuracy if panel == "accuracy" else run.series(panel)
    values = series.values
    if len(values) >= SMOOTH_FROM:
        values = running_mean(values, max(len(values) // 20, 3))
    return [float(i) for i in series.iterations], values


def draw(study: "Study", results: Sequence[Result], path: Path) -> None:
    """Write the figure: a row for each group of arms, a column for each panel, the mean over seeds and its error."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs, panels, ink = by_arm(results), study.panels or list(PANELS), INK
    rows = {}
    for title, patterns in study.groups.items():
        arms = [arm for arm in study.arms if arm in runs and any(fnmatchcase(arm, pattern) for pattern in patterns)]
        if arms:
            rows[title] = [arm for arm in arms if arm != study.baseline]
    with rc_context({"font.size": 8.0, "font.family": "sans-serif"}):
        width, height = PANEL_INCHES
        size = (width * len(panels), height * max(len(rows), 1))
        sheet = Figure(size, dpi=150, facecolor=ink["paper"], layout="constrained")
        FigureCanvasAgg(sheet)
        all_axes = sheet.subplots(max(len(rows), 1), len(panels), squeeze=False)
        for line, (title, arms) in zip(all_axes, rows.items(), strict=False):
            for axes, panel in zip(line, panels, strict=True):
                prepare(axes, TITLES.get(panel, panel))
                if study.baseline in runs:
                    _band(axes, runs[study.baseline], panel, label=study.baseline, color="#20242c")
                for index, arm in enumerate(arms):
                    style = ("-", "--", ":")[index // len(COLORS) % 3]
                    _band(axes, runs[arm], panel, label=arm, color=COLORS[index % len(COLORS)], linestyle=style)
                if panel in LOGARITHMIC and axes.lines:
                    axes.set_yscale("log")
            line[0].set_ylabel(title, fontsize=9, color=ink["text"])
            handles, labels = line[0].get_legend_handles_labels()
            line[-1].legend(
                handles,
                labels,
                fontsize=6,
                labelcolor=ink["text"],
                frameon=False,
                loc="upper left",
                bbox_to_anchor=(1, 1),
            )
        from PIL import Image

        image = io.BytesIO()
        sheet.savefig(image, format="png", facecolor=ink["paper"], bbox_inches="tight")
    Image.open(image).convert("RGB").quantize(256).save(path, format="png", optimize=True)


def _band(axes: Any, runs: dict[int, Run], panel: str, color: str, **style: Any) -> None:
    at: dict[float, list[float]] = {}
    for run in runs.values():
        for x, y in zip(*curve(run, panel), strict=True):
            at.setdefault(x, []).append(y)
    if not at:
        return
    xs = sorted(at)
    means = [fmean(at[x]) for x in xs]
    axes.plot(xs, means, linewidth=1.4, color=color, **style)
    if len(runs) > 1:
        errors = [standard_error(at[x]) if len(at[x]) > 1 else 0.0 for x in xs]
        low, high = ([m + side * e for m, e in zip(means, errors, strict=True)] for side in (-1, 1))
        axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
