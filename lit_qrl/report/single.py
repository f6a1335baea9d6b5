"""The report of one run: `report/index.html` and the PNG of every figure."""

import html
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_qrl.report import page
from lit_qrl.report.figures import Figure, draw, figures_for
from lit_qrl.report.histograms import draw_histograms, histograms_of
from lit_qrl.report.run import Run

EVENTS_SHOWN = 200
"""A run with a broken reward can log an event for every sample; the file has them all."""
CHARACTERS_SHOWN = 6000
"""Of a prompt or completion."""


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
    run = Run(folder)
    out = folder / "report" if out is None else Path(out)
    out.mkdir(parents=True, exist_ok=True)
    figures = figures_for([run])
    sections = [(figure.key, figure.heading, figure_card(figure, [run], [run.name], out)) for figure in figures]
    if not figures:
        text = "<p class=caption>No metrics have been logged yet.</p>"
        sections.append(("empty", "Nothing to plot", page.card("empty", "Nothing to plot", text)))
    sections += [
        section
        for section in (_histograms(run, out), _samples(run), _events(run), _layers(run), _config(run))
        if section
    ]
    body = [
        page.header(run.name, _subtitle(run), run.status),
        page.navigation([(key, heading) for key, heading, _ in sections]),
        page.tiles(_tiles(run)),
        *(content for _, _, content in sections),
        f"<footer>{html.escape(str(folder.resolve()))} · written {time.strftime('%Y-%m-%d %H:%M')}</footer>",
    ]
    index = out / "index.html"
    index.write_text(page.page(run.name, "\n".join(body)), encoding="utf-8", errors="replace")
    return index


def figure_card(figure: Figure, runs: Sequence[Run], labels: Sequence[str], out: Path) -> str:
    """Return the section of a figure, and write its PNG into `out`."""
    light, dark = draw(figure, runs, labels, "light"), draw(figure, runs, labels, "dark")
    (out / f"{figure.key}.png").write_bytes(light)
    description = f"{figure.heading}: {', '.join(panel.title for panel in figure.panels)} over iterations"
    return page.card(figure.key, figure.heading, page.picture(light, dark, description), figure.caption)


def accuracy_change(run: Run) -> tuple[str, str, str]:
    """Return the held-out accuracy before and after, its change, and the change's tone."""
    accuracy = run.accuracy
    if accuracy.first is None or accuracy.last is None:
        return "–", "", ""
    if len(accuracy.values) == 1:
        return f"{accuracy.last:.3f}", f"at iteration {accuracy.iterations[-1]}", ""
    change = accuracy.last - accuracy.first
    tone = "up" if change > 0 else "down" if change < 0 else ""
    return f"{accuracy.first:.3f} → {accuracy.last:.3f}", f"{change:+.3f}", tone


def _tiles(run: Run) -> list[str]:
    before_after, change, tone = accuracy_change(run)
    ess = run.series("mismatch/ess_ratio")
    worst = ess.iterations[ess.values.index(ess.minimum)] if ess.minimum is not None else None
    planned = run.setting("trainer", "max_epochs")
    kl = run.series("mismatch/kl_k3") or run.series("mismatch/kl_k1")
    rewards = run.series("reward/mean")
    speed, per_iteration = run.series("rollout/tokens_per_second"), run.series("time/iteration")
    return [
        page.tile("Held-out accuracy", before_after, change, tone, wide=True),
        page.tile("Reward", f"{page.number(rewards.first)} → {page.number(rewards.last)}" if rewards else "–"),
        page.tile("Mean KL(sampler ‖ learner)", page.number(kl.mean, 4), "nats per token" if kl else ""),
        page.tile("Lowest ESS ratio", page.number(ess.minimum), f"at iteration {worst}" if worst is not None else ""),
        page.tile(
            "Iterations", str(run.iterations), f"of {planned}" if isinstance(planned, int) and planned > 0 else ""
        ),
        page.tile(
            "Wall time",
            page.duration(run.seconds),
            f"{page.duration(per_iteration.mean)} per iteration" if per_iteration else "",
        ),
        page.tile("Tokens per second", page.number(speed.mean), "drawn by the sampler" if speed else ""),
        page.tile("Sampler format", run.format or "–"),
        page.tile("Correction", run.correction or "–"),
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


def _histograms(run: Run, out: Path) -> tuple[str, str, str] | None:
    histograms = histograms_of(run)
    if not histograms:
        return None
    light, dark = draw_histograms(histograms, "light"), draw_histograms(histograms, "dark")
    (out / "histograms.png").write_bytes(light)
    picture = page.picture(light, dark, "Histograms: " + ", ".join(str(one.get("title", "")) for one in histograms))
    iteration = run.histograms.get("iteration")
    caption = f"The tokens of iteration {iteration}." if iteration is not None else ""
    return "histograms", "Histograms", page.card("histograms", "Histograms", picture, caption)


def _samples(run: Run) -> tuple[str, str, str] | None:
    chosen = first_middle_last(run.samples)
    if not chosen:
        return None
    rows = []
    for iteration, samples in chosen:
        version = samples[0].get("version")
        note = f"<span>· weights of version {html.escape(str(version))}</span>" if version is not None else ""
        rows.append(f"<tr class=group><td colspan=3>Iteration {html.escape(str(iteration))} {note}</td></tr>")
        rows += [_sample_row(sample) for sample in samples]
    content = (
        "<table class=samples><colgroup><col style='width:34%'><col><col style='width:150px'></colgroup>"
        "<thead><tr><th>Prompt</th><th>Completion</th><th>Reward</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    caption = "What the policy wrote in the first, the middle and the last iteration; not selected by reward."
    return "samples", "Samples", page.card("samples", "Samples", content, caption)


def _sample_row(sample: dict[str, Any]) -> str:
    reward = sample.get("reward")
    value = float(reward) if isinstance(reward, (int, float)) else None
    correct = sample.get("correct")
    good = correct if isinstance(correct, bool) else None if value is None else value > 0
    tone = "" if good is None else "good" if good else "bad"
    parts = sample.get("parts")
    listed = parts.items() if isinstance(parts, dict) and len(parts) > 1 else ()
    lines = "".join(f"<div>{html.escape(f'{name} {_value(part)}')}</div>" for name, part in listed)
    return (
        f"<tr><td>{page.block(_shorten(sample.get('prompt', '')))}</td>"
        f"<td>{page.block(_shorten(sample.get('completion', '')))}</td>"
        f"<td>{page.pill(_value(reward), tone)}<div class=parts>{lines}</div></td></tr>"
    )


def first_middle_last(samples: Sequence[dict[str, Any]]) -> list[tuple[Any, list[dict[str, Any]]]]:
    """Return the samples of the first, the middle and the last iteration that have any.

    >>> [i for i, _ in first_middle_last([{"iteration": i} for i in range(1, 10)])]
    [1, 5, 9]
    """
    by_iteration: dict[Any, list[dict[str, Any]]] = {}
    for sample in samples:
        by_iteration.setdefault(sample.get("iteration", 0), []).append(sample)
    keys = list(by_iteration)
    if not keys:
        return []
    chosen = sorted({0, len(keys) // 2, len(keys) - 1})
    return [(keys[i], by_iteration[keys[i]]) for i in chosen]


def _events(run: Run) -> tuple[str, str, str] | None:
    if not run.events:
        return None
    tones = {"exception": "bad", "stopped": "bad", "interrupt": "warn", "finish": "good", "start": "", "resume": ""}
    rows = []
    for event in run.events[-EVENTS_SHOWN:]:
        kind = str(event.get("kind", ""))
        moment = time.strftime("%H:%M:%S", time.localtime(event["time"])) if _is_time(event.get("time")) else ""
        iteration = event.get("iteration")
        message = html.escape(_shorten(str(event.get("message", ""))))
        rows.append(
            [
                moment,
                html.escape(str(iteration)) if iteration is not None else "",
                page.pill(kind, tones.get(kind, "warn")),
                message,
            ]
        )
    content = page.table(["Time", "Iteration", "Kind", "What happened"], rows, numeric=[1])
    left_out = len(run.events) - len(rows)
    caption = "Dotted lines mark them in the plots."
    if left_out > 0:
        caption = f"The last {len(rows)} of {len(run.events)} events; events.jsonl has all."
    return "events", "Events", page.card("events", "Events", content, caption)


def _layers(run: Run) -> tuple[str, str, str] | None:
    if not run.layers:
        return None
    groups = Counter((re.sub(r"(?<=\.)\d+(?=\.)", "*", name), format) for name, format in run.layers.items())
    rows = [[f"<code>{html.escape(name)}</code>", html.escape(format), str(n)] for (name, format), n in groups.items()]
    counts = Counter(run.layers.values())
    note = ", ".join(f"{n} × {format}" for format, n in counts.most_common())
    version = run.publish.get("version")
    if version is not None:
        note += f", as loaded at version {version}"
    content = page.table(["Tensor", "Format loaded", "Number"], rows, numeric=[2])
    return "layers", "Formats by layer", page.folded("layers", "Formats by layer", note, content)


def _config(run: Run) -> tuple[str, str, str] | None:
    if not run.config_text.strip():
        return None
    content = page.block(run.config_text.strip())
    return "config", "Configuration", page.folded("config", "Configuration", "config.yaml of this run", content)


def _value(value: Any) -> str:
    return page.number(value) if value is None or isinstance(value, (int, float)) else str(value)


def _shorten(text: Any) -> str:
    text = str(text)
    cut = len(text) - CHARACTERS_SHOWN
    return text if cut <= 0 else f"{text[:CHARACTERS_SHOWN]} … ({cut} more characters)"


def _is_time(value: Any) -> bool:
    # Beyond this range the C library's calendar fails.
    return isinstance(value, (int, float)) and 0 <= value < 1e11
