"""The figure of the pilot: what a learner without correction loses, by mismatch and by learning rate."""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from lit_qrl.report.figures import COLORS, INK, prepare

PILOT_FILE, PILOT_FIGURE = "pilot.csv", "pilot.png"


def draw_pilot(folder: Path) -> None:
    """Write `pilot.png` from the `pilot.csv` in `folder`: every run as a point, the mean of a setting as a line."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with (folder / PILOT_FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    ink, rates = INK, sorted({float(row["rate"]) for row in rows})
    with rc_context({"font.size": 8.0, "font.family": "sans-serif"}):
        sheet = Figure((9.0, 3.2), dpi=150, facecolor=ink["paper"], layout="constrained")
        FigureCanvasAgg(sheet)
        panels = zip(sheet.subplots(1, 2, sharey=True), ("learner", "sampler"), strict=True)
        for axes, policy in panels:
            prepare(axes, f"The {policy}'s accuracy, no correction")
            for rate, color in zip(rates, COLORS, strict=False):
                points: dict[str, list[tuple[float, float]]] = defaultdict(list)
                for row in (row for row in rows if float(row["rate"]) == rate):
                    kind = "bf16" if row["arm"].endswith("bf16") else row["arm"]
                    points[kind].append((float(row["log_ratio_first"]), float(row[f"{policy}_accuracy"])))
                means = sorted((fmean(x for x, _ in there), fmean(y for _, y in there)) for there in points.values())
                axes.plot(*zip(*means, strict=True), color=color, linewidth=1.4, label=f"{rate:g}")
                axes.scatter(*zip(*(one for there in points.values() for one in there), strict=True), s=12, color=color)
            axes.set_xscale("log")
            axes.set_xlabel("mean |log-ratio| of the first iterations, nats", fontsize=8, color=ink["faint"])
            axes.set_ylim(-0.02, 1.02)
        axes.legend(title="learning rate", fontsize=7, title_fontsize=7, frameon=False, labelcolor=ink["text"])
        sheet.savefig(folder / PILOT_FIGURE, facecolor=ink["paper"])
