"""The figure of the long-reasoning study: what learner and sampler solve over training, an arm to a line."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean

from lit_qrl.report.figures import COLORS, INK, prepare

PANELS = {"learner": "Learner's accuracy", "sampler": "Sampler's accuracy, the reward"}
NAMES = {
    "s1+none+bf16": "bf16 sampler",
    "s1+none+nvfp4": "NVFP4",
    "s1+none+fp8_cache": "FP8 KV cache",
    "s1+sequence_tis+bf16": "bf16, sequence TIS",
    "none": "no correction",
    "tis": "TIS",
    "mis": "MIS",
    "ais": "AIS",
    "sequence_tis": "sequence TIS",
    "sequence_mis": "sequence MIS",
    "gspo": "GSPO",
    "tbpo": "TBPO",
    "aqn": "AQN",
    "int4_aligned": "QATAligned",
}
STYLES = ("-", "--", ":")
TICKS = 10
"""Iterations between two marks."""


def name_of(arm: str) -> str:
    """Return what an arm is called in the figure.

    >>> name_of("s8+none+int4"), name_of("s8+none+int4_aligned"), name_of("s1+none+bf16"), name_of("s8+gspo+int4")
    ('no correction', 'QATAligned', 'bf16 sampler', 'GSPO')
    """
    _, correction, sampler = arm.split("+")
    return NAMES.get(arm) or NAMES.get(sampler) or NAMES.get(correction, correction)


def means(rows: Sequence[Mapping[str, object]], name: str) -> dict[str, list[tuple[int, float]]]:
    """Return for each arm the mean over seeds at each evaluation that all of its seeds have which were trained."""
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    seeds: dict[str, set[object]] = defaultdict(set)
    for row in rows:
        arm = str(row["arm"])
        if row["iteration"] != 0:
            seeds[arm].add(row["seed"])
        if row[name] is not None:
            values[arm][int(str(row["iteration"]))].append(float(str(row[name])))
    return {
        arm: [(at, fmean(found)) for at, found in sorted(points.items()) if len(found) >= len(seeds[arm]) > 0]
        for arm, points in values.items()
    }


def draw(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write the figure."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink = INK
    with rc_context({"font.size": 8.0, "font.family": "sans-serif"}):
        sheet = Figure((9.0, 3.4), dpi=150, facecolor=ink["paper"], layout="constrained")
        FigureCanvasAgg(sheet)
        for axes, (name, title) in zip(sheet.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
            prepare(axes, title)
            looks = ((color, style) for style in STYLES for color in COLORS)
            for (arm, points), (color, style) in zip(means(rows, name).items(), cycle(looks), strict=False):
                if points:
                    xs, ys = zip(*points, strict=True)
                    axes.plot(xs, ys, color=color, linestyle=style, linewidth=1.4, label=name_of(arm))
            last = max((int(str(row["iteration"])) for row in rows), default=0)
            axes.set_xticks(range(0, last + 1, TICKS))
            axes.set_xlabel("iteration", fontsize=8, color=ink["faint"])
        sheet.legend(
            *sheet.axes[0].get_legend_handles_labels(),
            loc="outside right center",
            fontsize=7,
            frameon=False,
            labelcolor=ink["text"],
        )
        sheet.savefig(path, facecolor=ink["paper"])
