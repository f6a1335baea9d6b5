"""Several runs on one page: a table, and their curves over each other."""

import html
import os
from collections.abc import Sequence
from pathlib import Path

from lit_qrl.report import page
from lit_qrl.report.figures import COLORS, figures_for
from lit_qrl.report.run import Run
from lit_qrl.report.single import accuracy_change, figure_card

COLUMNS = (
    "Run", "Format", "Correction", "Iterations", "Accuracy before", "after", "change", "Reward, last", "Mean KL",
    "Lowest ESS", "Tokens/s", "s / iteration", "Status",
)  # fmt: skip


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
    figures = figures_for(runs)
    sections = [(figure.key, figure.heading, figure_card(figure, runs, labels, out)) for figure in figures]
    title = f"{len(runs)} runs"
    body = [
        page.header(title, " · ".join(labels)),
        page.navigation([("table", "Table"), *((key, heading) for key, heading, _ in sections)]),
        page.card("table", "Side by side", page.table(COLUMNS, _rows(runs, labels), numeric=range(3, 12))),
        *(content for _, _, content in sections),
    ]
    index = out / "index.html"
    index.write_text(page.page(title, "\n".join(body)), encoding="utf-8", errors="replace")
    return index


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


def _rows(runs: Sequence[Run], labels: Sequence[str]) -> list[list[str]]:
    rows = []
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        accuracy, (_, change, tone) = run.accuracy, accuracy_change(run)
        several = len(accuracy.values) > 1
        swatch = f"<span class=swatch style='background:{COLORS[index % len(COLORS)]}'></span>"
        kl = run.series("mismatch/kl_k3") or run.series("mismatch/kl_k1")
        rows.append(
            [
                f"<span class=name>{swatch}{html.escape(label)}</span>",
                html.escape(run.format or "–"),
                html.escape(run.correction or "–"),
                str(run.iterations),
                page.number(accuracy.first),
                page.number(accuracy.last) if several else "–",
                f"<span class='{tone}'>{html.escape(change)}</span>" if several else "–",
                page.number(run.series("reward/mean").last),
                page.number(kl.mean, 4),
                page.number(run.series("mismatch/ess_ratio").minimum),
                page.number(run.series("rollout/tokens_per_second").mean),
                page.number(run.series("time/iteration").mean, 2),
                page.pill(run.status, page.STATUS.get(run.status, "")),
            ]
        )
    return rows
