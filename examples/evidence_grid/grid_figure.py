"""The figure of the grid: what each correction leaves of a run, by the mismatch that it begins with."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import grid_table

from lit_qrl.report.figures import COLORS, INK, prepare

FIGURE_FILE = "levels.png"
CORRECTIONS = {"none": "no correction", "tis": "TIS", "ais": "AIS", "sequence_tis": "sequence TIS"}
UNTIL = 80
"""Iterations at which the study's runs, which are longer, are compared."""


def points_of(rows: Sequence[grid_table.Row], earlier: Path) -> dict[str, list[tuple[float, float]]]:
    """Return mean |log-ratio| of the first iteration and difference to bf16 of every run, by correction.

    Args:
        rows: of the grid's `runs.csv`; those at a level of the dial under INT4 count, and the study's replays.
        earlier: folder of the evidence study, whose curves say how far its runs were at the grid's end.
    """
    curves: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    with (earlier / "curves.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            if line["learner_accuracy"]:
                place = line["arm"], int(line["seed"])
                curves[place][int(line["iteration"])] = float(line["learner_accuracy"])
    runs = {grid_table.key(row): row for row in rows}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CORRECTIONS}
    for row in rows:
        parts, seed = str(row["arm"]).split("+"), int(str(row["seed"]))
        if len(parts) != 3 or parts[1] not in CORRECTIONS or parts[2] != "int4" or row["study"] == "pilot":
            continue
        if row["study"] == "grid":
            control = runs.get(("grid", row["rate"], grid_table.control_of(str(row["arm"])), seed))
            gap = grid_table.difference(row, control) if control else None
        else:
            ours, theirs = curves[str(row["arm"]), seed], curves[f"{parts[0]}+none+bf16", seed]
            last = range(UNTIL - 10 * (grid_table.LAST_EVALUATIONS - 1), UNTIL + 1, 10)
            gap = fmean(ours[at] - theirs[at] for at in last)
        if gap is not None:
            found[parts[1]].append((float(str(row["log_ratio_1"])), gap))
    return found


def draw(rows: Sequence[grid_table.Row], earlier: Path, path: Path) -> None:
    """Write the figure: every run as a point, means of neighbours as a line."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink = INK
    with rc_context({"font.size": 8.0, "font.family": "sans-serif"}):
        sheet = Figure((6.4, 3.4), dpi=150, facecolor=ink["paper"], layout="constrained")
        FigureCanvasAgg(sheet)
        axes = sheet.subplots()
        prepare(axes, "Learner's accuracy after 80 iterations, to a bf16 sampler's")
        for (name, points), color in zip(points_of(rows, earlier).items(), COLORS, strict=False):
            if points:
                axes.scatter(*zip(*points, strict=True), s=14, color=color, alpha=0.6)
                means = [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in levels(points)]
                axes.plot(*zip(*means, strict=True), color=color, linewidth=1.4, label=CORRECTIONS[name])
        axes.axhline(0.0, color=ink["faint"], linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1.0], ["0.02", "0.05", "0.1", "0.2", "0.5", "1"])
        axes.minorticks_off()
        axes.set_xlabel("mean |log-ratio| before the first update, nats", fontsize=8, color=ink["faint"])
        axes.legend(fontsize=7, frameon=False, labelcolor=ink["text"])
        sheet.savefig(path, facecolor=ink["paper"])


def levels(points: Sequence[tuple[float, float]], apart: float = 1.4) -> list[list[tuple[float, float]]]:
    """Return points in groups of neighbours: a new one begins where the next is that factor to the right.

    >>> [len(group) for group in levels([(0.01, 0.0), (0.011, 0.1), (0.02, 0.0)])]
    [2, 1]
    """
    groups: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if not groups or point[0] > apart * groups[-1][-1][0]:
            groups.append([])
        groups[-1].append(point)
    return groups
