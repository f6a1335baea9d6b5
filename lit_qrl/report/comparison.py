"""Several runs on one page: a table, and their curves over each other."""

import os
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from lit_qrl.report import page
from lit_qrl.report.figures import COLORS, figures_for
from lit_qrl.report.run import Run
from lit_qrl.report.single import accuracy_change, figure_section


def render_comparison(run_folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page that compares runs and return the path of its `index.html`.

    Args:
        run_folders: at least one run folder; the order is kept.
        out: folder to write into.

    Raises:
        FileNotFoundError: when one of the folders does not exist.
        ValueError: when no folder is given.
    """
    if not run_folders:
        raise ValueError("A comparison needs at least one run folder, none was given.")
    for folder in run_folders:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"There is no run folder at {folder}.")
    runs = [Run(folder) for folder in run_folders]
    labels = labels_of([run.folder for run in runs])
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    figures = [figure_section(figure, runs, labels, out) for figure in figures_for(runs)]
    table = page.Section("table", "Side by side", "runs.html", rows=_rows(runs, labels))
    return page.write(out, f"{len(runs)} runs", " · ".join(labels), [table, *figures])


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return names that tell the folders apart: their paths without the part that all share.

    >>> labels_of([Path("runs/ais/0"), Path("runs/none/0")])
    ['ais/0', 'none/0']
    """
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) == 1:
        names = [paths[0].name] * len(paths)
    else:
        shared = Path(os.path.commonpath(paths))
        names = [str(path.relative_to(shared)) for path in paths]
        names = [path.name if name == "." else name for name, path in zip(names, paths, strict=True)]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _rows(runs: Sequence[Run], labels: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for run, label, color in zip(runs, labels, cycle(COLORS), strict=False):
        _, change, tone = accuracy_change(run)
        several = len(run.accuracy.values) > 1
        rows.append(
            {
                "run": run,
                "label": label,
                "color": color,
                "after": run.accuracy.last if several else None,
                "change": change if several else "–",
                "tone": tone if several else "",
            }
        )
    return rows
