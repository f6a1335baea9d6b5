"""The figure of AIS's strength: α over training against the mismatch that each ten iterations had."""

import csv
from collections import defaultdict
from pathlib import Path

from lit_qrl.report.figures import COLORS, INK, prepare

FIGURE_FILE = "alpha.png"
TITLE = "AIS's α, means of ten iterations each, from the first (circle) to the last"


def paths_of(curves: Path) -> dict[str, list[list[tuple[float, float]]]]:
    """Return mean |log-ratio| and α along each run of AIS under INT4, by position of the dial.

    Args:
        curves: the grid's `curves.csv`.
    """
    runs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with curves.open(newline="") as file:
        for line in csv.DictReader(file):
            scale, *rest = line["arm"].split("+")
            if rest == ["ais", "int4"] and line["alpha"] and line["abs_log_ratio"]:
                runs[scale, line["seed"]].append((float(line["abs_log_ratio"]), float(line["alpha"])))
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for scale, seed in sorted(runs, key=lambda one: (int(one[0][1:]), int(one[1]))):
        found.setdefault(scale, []).append(runs[scale, seed])
    return found


def draw(curves: Path, path: Path) -> None:
    """Write the figure: a line for each run."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink = INK
    with rc_context({"font.size": 8.0, "font.family": "sans-serif"}):
        sheet = Figure((6.4, 3.2), dpi=150, facecolor=ink["paper"], layout="constrained")
        FigureCanvasAgg(sheet)
        axes = sheet.subplots()
        prepare(axes, TITLE)
        for (scale, runs), color in zip(paths_of(curves).items(), COLORS, strict=False):
            for number, points in enumerate(runs):
                label = f"dial at {scale[1:]}" if number == 0 else None
                axes.plot(*zip(*points, strict=True), color=color, linewidth=1.2, marker=".", label=label)
                axes.plot(*points[0], color=color, marker="o")
        axes.set_xscale("log")
        ticks = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("mean |log-ratio|, nats", fontsize=8, color=ink["faint"])
        if axes.lines:
            axes.legend(fontsize=7, frameon=False, labelcolor=ink["text"])
        sheet.savefig(path, facecolor=ink["paper"])
