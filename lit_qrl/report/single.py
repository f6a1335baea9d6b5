"""The report of one run: `report/index.html` and the PNG of every figure."""

import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_qrl.errors import named
from lit_qrl.report import page
from lit_qrl.report.figures import (
    PHASE_COLORS,
    REST_COLOR,
    Figure,
    Source,
    draw,
    draw_histograms,
    figures_for,
)
from lit_qrl.report.page import samples_section, shorten
from lit_qrl.report.run import BOUNDS, Run, Series, where_time_went

EVENTS_SHOWN = 200
"""A run with a broken reward can log an event for every sample; the file has them all."""


def render(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run and return the path of its `index.html`.

    The page needs nothing but itself: images and styles are inside. The same images lie beside it as PNG files.

    Args:
        run_folder: the folder of a finished, running or broken run.
        out: folder to write into; `<run_folder>/report` when None.

    Raises:
        FileNotFoundError: when the run folder does not exist.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no run folder at {folder}.")
    began = time.perf_counter()
    run = Run(folder)
    out = folder / "report" if out is None else Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sections = [figure_section(figure, [run], [run.name], out) for figure in figures_for([run])]
    if not sections:
        sections = [page.Section("empty", "Nothing to plot", caption="No metrics have been logged yet.")]
    others = (
        _timing(run),
        _evaluation(run),
        _histograms(run, out),
        samples_section(run),
        _events(run),
        _layers(run),
        _config(run),
    )
    took = page.duration(time.perf_counter() - began)
    return page.write(
        out,
        run.name,
        _subtitle(run),
        [*sections, *filter(None, others)],
        status=run.status,
        tiles=_tiles(run),
        footer=f"{folder.resolve()} · written {time.strftime('%Y-%m-%d %H:%M:%S')} in {took}",
    )


def figure_section(figure: Figure, runs: Sequence[Source], labels: Sequence[str], out: Path) -> page.Section:
    """Return the section of a figure, and write its PNG into `out`."""
    light, dark = draw(figure, runs, labels)
    description = f"{figure.heading}: {', '.join(panel.title for panel in figure.panels)} over iterations"
    return _picture(out, figure.key, figure.heading, figure.caption, description, light, dark)


def _picture(
    out: Path, key: str, heading: str, caption: str, description: str, light: bytes, dark: bytes
) -> page.Section:
    with named(out / f"{key}.png"):
        (out / f"{key}.png").write_bytes(light)
    return page.Section(key, heading, "picture.html", caption=caption, description=description, light=light, dark=dark)


def accuracy_change(accuracy: Series) -> tuple[str, str, str]:
    """Return an accuracy before and after, its change, and the change's tone."""
    if accuracy.first is None or accuracy.last is None:
        return "–", "", ""
    if len(accuracy.values) == 1:
        return f"{accuracy.last:.3f}", f"at iteration {accuracy.iterations[-1]}", ""
    change = accuracy.last - accuracy.first
    tone = "up" if change > 0 else "down" if change < 0 else ""
    return f"{accuracy.first:.3f} → {accuracy.last:.3f}", f"{change:+.3f}", tone


def _tiles(run: Run) -> list[page.Tile]:
    answers = {"sampled": "val/accuracy", "greedy": "val/greedy_pass@1"}
    accuracies = {f"Held-out accuracy, {how}": run.series(name) for how, name in answers.items() if run.series(name)}
    ess = run.series("mismatch/ess_ratio")
    worst = ess.iterations[ess.values.index(ess.minimum)] if ess.minimum is not None else None
    planned = run.setting("trainer", "max_epochs")
    kl, rewards = run.kl, run.series("reward/mean")
    speed, per_iteration = run.series("rollout/tokens_per_second"), run.series("time/iteration")
    return [
        *(
            page.Tile(label, *accuracy_change(series), wide=len(accuracies) < 2)
            for label, series in (accuracies or {"Held-out accuracy": run.accuracy}).items()
        ),
        page.Tile("Reward", f"{page.number(rewards.first)} → {page.number(rewards.last)}" if rewards else "–"),
        page.Tile("Mean KL(sampler ‖ learner)", page.number(kl.mean, 4), "nats per token" if kl else ""),
        page.Tile("Lowest ESS ratio", page.number(ess.minimum), f"at iteration {worst}" if worst is not None else ""),
        page.Tile(
            "Iterations", str(run.iterations), f"of {planned}" if isinstance(planned, int) and planned > 0 else ""
        ),
        page.Tile(
            "Wall time",
            page.duration(run.seconds),
            f"{page.duration(per_iteration.mean)} per iteration" if per_iteration else "",
        ),
        page.Tile("Tokens per second", page.number(speed.mean), "generated by the sampler" if speed else ""),
        page.Tile("Sampler format", run.format or "–"),
        page.Tile("Weights quantized", _percent(run.share("quantized")), "of the parameters" if run.layers else ""),
        page.Tile("Weights verified", _percent(run.share("verified")), "of the bytes sent" if run.layers else ""),
        page.Tile("Correction", run.correction or "–"),
    ]


def _subtitle(run: Run) -> str:
    started = run.started
    model = run.setting("model", "policy", "init_args", "model") or run.setting("model", "policy", "model")
    task = run.setting("data", "task")
    pieces: list[Any] = [
        model,
        str(task.get("class_path", "")).rsplit(".", 1)[-1] if isinstance(task, dict) else task,
        started.get("device"),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(started["time"])) if _is_time(started.get("time")) else None,
    ]
    return " · ".join(str(piece) for piece in pieces if piece)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _timing(run: Run) -> page.Section | None:
    rows = where_time_went(run)
    if not rows:
        return None
    caption = f"The {page.duration(sum(row.seconds for row in rows))} of the run by phase."
    if rows[-1].mean is None:
        caption += " Outside of iterations: the start, the first evaluation, and iterations that were cut short."
    colors = [PHASE_COLORS.get(row.name, REST_COLOR) for row in rows]
    return page.Section("phases", "Where the time went", "timing.html", caption=caption, rows=rows, colors=colors)


def _evaluation(run: Run) -> page.Section | None:
    """Return the table of the last evaluation: each accuracy with its interval, beside what it was at first."""
    own = [name for name in run.prefixed("val/") if name.count("/") == 1 and not name.endswith(BOUNDS)]
    chosen = {"held out": own, **run.benchmarks}
    rows = [
        {
            "benchmark": benchmark,
            "metric": name.rpartition("/")[2].replace("_", " "),
            "first": run.series(name).first,
            "last": run.series(name).last,
            "low": run.interval(name)[0].last,
            "high": run.interval(name)[1].last,
            "iteration": run.series(name).iterations[-1],
        }
        for benchmark, names in chosen.items()
        for name in names
        if run.series(name)
    ]
    caption = (
        "First and last accuracy on the held-out problems and the benchmarks, with the 95 % interval of the last "
        "(Wilson's; with several samples per problem, at their effective number)."
    )
    return page.Section("evaluation", "Evaluation", "evaluation.html", caption=caption, rows=rows) if rows else None


def _histograms(run: Run, out: Path) -> page.Section | None:
    if not (histograms := run.histograms.get("histograms")):
        return None
    iteration = run.histograms.get("iteration")
    caption = f"The tokens of iteration {iteration}." if iteration is not None else ""
    try:
        description = "Histograms: " + ", ".join(str(one.get("title", "")) for one in histograms)
        light, dark = draw_histograms(histograms)
    except (AttributeError, KeyError, TypeError, ValueError):  # not as a run writes them
        return None
    return _picture(out, "histograms", "Histograms", caption, description, light, dark)


def _events(run: Run) -> page.Section | None:
    if not run.events:
        return None
    tones = {"exception": "bad", "stopped": "bad", "finish": "good"}
    tones |= dict.fromkeys(("start", "resume", "sampler", "update"), "")
    shown = []
    for event in run.events[-EVENTS_SHOWN:]:
        kind, iteration, moment = str(event.get("kind", "")), event.get("iteration"), event.get("time")
        shown.append(
            {
                "moment": time.strftime("%H:%M:%S", time.localtime(moment)) if _is_time(moment) else "",
                "iteration": "" if iteration is None else iteration,
                "kind": kind,
                "tone": tones.get(kind, "warn"),
                "message": shorten(event.get("message", "")),
            }
        )
    caption = "A dotted line in the plots marks each event that is not routine."
    if len(run.events) > len(shown):
        caption = f"The last {len(shown)} of {len(run.events)} events; events.jsonl has all."
    return page.Section("events", "Events", "events.html", caption=caption, events=shown)


def _layers(run: Run) -> page.Section | None:
    if not run.layers:
        return None
    groups, sizes, bytes = Counter(), Counter(), Counter()
    for name, format in run.layers.items():
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", name), format
        groups[key] += 1
        sizes[key] += run.sizes.get(name, 0)
        bytes[format] += run.sizes.get(name, 0)
    whole = sum(bytes.values())
    if whole:
        note = ", ".join(f"{n / whole:.1%} of the bytes in {format}" for format, n in bytes.most_common())
    else:
        note = ", ".join(f"{n} × {format}" for format, n in Counter(run.layers.values()).most_common())
    for kind in ("quantized", "verified"):
        share = run.share(kind)
        of = "parameters" if kind == "quantized" else "bytes sent"
        note += "" if share is None else f"; {share:.1%} of the {of} {kind}"
    version = run.publish.get("version")
    if version is not None:
        note += f", as loaded at version {version}"
    rows = [(*key, n, f"{sizes[key] / whole:.2%}" if whole else "–") for key, n in groups.items()]
    return page.Section("layers", "Formats by layer", "layers.html", note=note, rows=rows)


def _config(run: Run) -> page.Section | None:
    if not (text := run.config_text.strip()):
        return None
    return page.Section("config", "Configuration", "config.html", note="config.yaml of this run", text=text)


def _is_time(value: Any) -> bool:
    # Beyond this range the C library's calendar fails.
    return isinstance(value, (int, float)) and 0 <= value < 1e11
