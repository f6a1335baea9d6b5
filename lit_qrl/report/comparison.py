"""Several runs on one page: a table, and their curves over each other, those of one configuration as a band."""

import os
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from lit_qrl.report import page
from lit_qrl.report.figures import COLORS, Source, figures_for
from lit_qrl.report.run import BAND, Run, Seeds, by_configuration
from lit_qrl.report.single import accuracy_change, figure_section


def render_comparison(run_folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write a page that compares runs and return the path of its `index.html`.

    Runs whose configurations differ in seed and place only are one line: their mean, with a band around it.

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
    # A folder that was given twice is no second seed.
    runs = [Run(folder) for folder in dict.fromkeys(Path(folder).resolve() for folder in run_folders)]
    labels = labels_of([run.folder for run in runs])
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    groups = by_configuration(runs)
    names = [label_of([labels[i] for i in group]) for group in groups]
    sources: list[Source] = [Seeds([runs[i] for i in group]) if len(group) > 1 else runs[group[0]] for group in groups]
    figures = [figure_section(figure, sources, names, out) for figure in figures_for(sources)]
    several = any(len(group) > 1 for group in groups)
    caption = (
        f"Runs that differ only in seed are drawn as one: the line is their mean, the band {BAND}, at the "
        "iterations that all of them have. A band around a single run's accuracy is its 95 % interval over problems."
    )
    table = page.Section(
        "table",
        "Side by side",
        "runs.html",
        caption=caption if several else "",
        rows=_rows(runs, labels, groups, names),
    )
    return page.write(out, f"{len(runs)} runs", " · ".join(names), [table, *figures])


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


def label_of(labels: Sequence[str]) -> str:
    """Return a name for runs of one configuration: what their names share, and how many they are.

    >>> label_of(["ais/1", "ais/2"]), label_of(["1", "2", "3"]), label_of(["ais/1"])
    ('ais (2 seeds)', '1 … 3 (3 seeds)', 'ais/1')
    """
    if len(labels) == 1:
        return labels[0]
    shared = os.path.commonpath(labels)
    return f"{shared or f'{labels[0]} … {labels[-1]}'} ({len(labels)} seeds)"


def _rows(
    runs: Sequence[Run], labels: Sequence[str], groups: Sequence[Sequence[int]], names: Sequence[str]
) -> list[dict[str, Any]]:
    rows = []
    for group, name, color in zip(groups, names, cycle(COLORS), strict=False):
        own = [_row(runs[i], labels[i], color) for i in group]
        if len(group) > 1:
            mean = {"kind": "mean", "label": name, "color": color, "iterations": "", "tone": "", "status": ""}
            rows.append({**own[0], **mean, "numbers": _numbers([runs[i] for i in group])})
            for row in own:
                row["color"], row["kind"] = "", "of"
        rows += own
    return rows


def _row(run: Run, label: str, color: str) -> dict[str, Any]:
    several = len(run.accuracy.values) > 1
    return {
        "kind": "",
        "label": label,
        "color": color,
        "format": run.format or "–",
        "correction": run.correction or "–",
        "iterations": run.iterations,
        "numbers": _numbers([run]),
        "tone": accuracy_change(run.accuracy)[2] if several else "",
        "status": run.status,
    }


def _numbers(runs: Sequence[Run]) -> list[str]:
    """Return the means over runs of what a row shows, with their standard errors where the runs are several."""
    several, mean = [run for run in runs if len(run.accuracy.values) > 1], page.mean_and_error
    return [
        mean([run.accuracy.first for run in runs]),
        mean([run.accuracy.last for run in several]),
        mean([(run.accuracy.last or 0.0) - (run.accuracy.first or 0.0) for run in several], signed=True),
        mean([run.series("reward/mean").last for run in runs]),
        mean([run.kl.mean for run in runs], 4),
        mean([run.series("mismatch/ess_ratio").minimum for run in runs]),
        mean([run.series("rollout/tokens_per_second").mean for run in runs]),
        mean([run.series("time/iteration").mean for run in runs], 2),
    ]
