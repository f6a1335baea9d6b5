"""Histograms of a run's last look at its tokens, from `histograms.json`.

The file holds a list under `histograms`, and the `iteration` they were taken in. Each has a `title`, an axis `x` with
`label` and `edges`, and `counts`: by name one list each (drawn over each other), or with a second axis `y` a list of
lists "x y" (drawn as a map, on a logarithmic scale of counts). `lines` are positions on the x axis to mark, such as
clip bounds. Counts by name stand on a logarithmic scale; `scale: linear` is for means and shares.
"""

import io
import math
from itertools import pairwise
from typing import Any

from lit_qrl.report.figures import COLORS, INK, Theme, grid, prepare
from lit_qrl.report.page import fewer_colors
from lit_qrl.report.run import Run


def histograms_of(run: Run) -> list[dict[str, Any]]:
    """Return the run's histograms that are whole."""
    listed = run.histograms.get("histograms")
    return [one for one in listed if _is_whole(one)] if isinstance(listed, list) else []


def draw_histograms(histograms: list[dict[str, Any]], theme: Theme) -> bytes:
    """Return the PNG of all histograms, side by side."""
    from matplotlib import rc_context
    from matplotlib.colors import LogNorm

    ink = INK[theme]
    with rc_context({"font.size": 9.0, "font.family": "sans-serif"}):
        sheet, all_axes = grid(len(histograms), ink)
        for axes, one in zip(all_axes, histograms, strict=True):
            prepare(axes, str(one.get("title", "")), ink)
            x, counts = one["x"]["edges"], one["counts"]
            if isinstance(counts, dict):
                for color, (name, heights) in zip(COLORS, counts.items(), strict=False):
                    axes.stairs(heights, x, color=color, fill=True, alpha=0.35)
                    axes.stairs(heights, x, color=color, linewidth=1.4, label=str(name))
                if one.get("scale") != "linear":
                    axes.set_yscale("symlog", linthresh=1)
                if len(counts) > 1:
                    axes.legend(fontsize=7.5, labelcolor=ink["text"], frameon=False)
            else:
                mesh = [[value or math.nan for value in column] for column in zip(*counts, strict=True)]
                most = max((v for column in mesh for v in column if v == v), default=1.0)
                axes.pcolormesh(x, one["y"]["edges"], mesh, norm=LogNorm(1, max(most, 2)), cmap="viridis")
                axes.set_ylabel(str(one["y"].get("label", "")), fontsize=8, color=ink["faint"])
            for position in one.get("lines") or ():
                axes.axvline(position, color=ink["faint"], linewidth=1.0, linestyle="--")
            axes.set_xlabel(str(one["x"].get("label", "")), fontsize=8, color=ink["faint"])
        image = io.BytesIO()
        sheet.savefig(image, format="png", facecolor=ink["paper"])
    return fewer_colors(image.getvalue())


def _is_whole(one: Any) -> bool:
    if not isinstance(one, dict) or not _is_axis(one.get("x")):
        return False
    counts, width = one.get("counts"), len(one["x"]["edges"]) - 1
    if isinstance(counts, dict):
        return bool(counts) and all(_are_numbers(heights, width) for heights in counts.values())
    if not isinstance(counts, list) or len(counts) != width or not _is_axis(one.get("y")):
        return False
    return all(_are_numbers(column, len(one["y"]["edges"]) - 1) for column in counts)


def _is_axis(axis: Any) -> bool:
    edges = axis.get("edges") if isinstance(axis, dict) else None
    if not isinstance(edges, list) or len(edges) < 2 or not _are_numbers(edges, len(edges)):
        return False
    return all(a < b for a, b in pairwise(edges))


def _are_numbers(values: Any, length: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == length
        and all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)
    )
