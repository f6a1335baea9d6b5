"""How a page is filled in from the templates beside this file, which escape every text that comes from a run."""

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from lit_qrl.report.run import Run, standard_error
from lit_qrl.run.event_log import replacing

TONES = {"finished": "good", "running": "", "interrupted": "warn", "failed": "bad"}
"""Colour of a run's status."""


@dataclass(frozen=True)
class Tile:
    """One number of the summary; `tone` (`up`, `down`) colours the note."""

    label: str
    value: str
    note: str = ""
    tone: str = ""
    wide: bool = False


class Section:
    """One section of a page.

    Args:
        key: its anchor.
        heading: what the navigation calls it.
        template: file of its content; none if empty.
        caption: below the heading.
        note: beside the heading of a section that opens at a click; empty for one that is open.
        **values: what its template reads, as attributes of `section`.
    """

    def __init__(
        self, key: str, heading: str, template: str = "", *, caption: str = "", note: str = "", **values: Any
    ) -> None:
        self.key, self.heading, self.template, self.caption, self.note = key, heading, template, caption, note
        vars(self).update(values)


def write(
    folder: Path,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    *,
    status: str = "",
    tiles: Sequence[Tile] = (),
    footer: str = "",
) -> Path:
    """Write a whole HTML document without any outside resource and return the path of its `index.html`."""
    environment = Environment(
        loader=PackageLoader("lit_qrl.report"), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    environment.filters.update(number=number, png=png, duration=duration)
    html = environment.get_template("page.html").render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        status=status,
        tiles=tiles,
        footer=footer,
        tones=TONES,
    )
    index = folder / "index.html"
    with replacing(index) as file:  # a browser that loads it meanwhile gets the whole page
        file.write(html.encode("utf-8", errors="replace"))
    return index


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for reading: few digits, a thin space between thousands, an en dash for none.

    >>> number(0.123456), number(123.4), number(0.0000321), number(None)
    ('0.123', '123', '3.21e-05', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    value += 0.0  # no negative zero
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    if size >= 100:
        return f"{value:.0f}"
    if size == 0 or size >= 10.0 ** (1 - digits):
        return f"{value:.{digits if size < 10 else 1}f}"
    return f"{value:.3g}"


def mean_and_error(values: Sequence[float | None], digits: int = 3, signed: bool = False) -> str:
    """Return the mean of those that are there ± its standard error.

    >>> mean_and_error([1.0, 2.0, 3.0, None]), mean_and_error([0.5], signed=True), mean_and_error([])
    ('2.000 ± 0.577', '+0.500', '–')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = math.fsum(known) / len(known)
    text = ("+" if signed and mean > 0 else "") + number(mean, digits)
    return text if len(known) < 2 else f"{text} ± {number(standard_error(known), digits)}"


def duration(seconds: float | None) -> str:
    """Return a time for reading.

    >>> duration(0.02), duration(9.4), duration(128), duration(7300)
    ('20 ms', '9.4 s', '2 min 8 s', '2 h 1 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.0005 else "< 1 ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def png(image: bytes) -> str:
    """Return an image as an address that carries it.

    >>> png(b"light")
    'data:image/png;base64,bGlnaHQ='
    """
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"


def png_of(sheet: Any) -> bytes:
    """Return a plot as a PNG of at most 256 colours, which takes about a third of the bytes."""
    from PIL import Image

    small = io.BytesIO()
    sheet.canvas.draw()
    Image.fromarray(np.asarray(sheet.canvas.buffer_rgba())).convert("RGB").quantize(256).save(small, format="png")
    return small.getvalue()


CHARACTERS_SHOWN = 6000
"""Of a prompt or completion."""
PAGE_CHARACTERS = 1_000_000
"""Of all samples on a page, with the markup of coloured tokens; with more, iterations are left out evenly."""
EDGES = (0.02, 0.1, 0.5)
"""Nats: |log-ratio| from which a token has the first, second and third shade."""
STAGES = 8
"""Of the order in which a completion was unmasked."""


def samples_section(run: Run) -> Section | None:
    """Return the section in which a run's samples are browsed, None without any."""
    by_iteration: dict[Any, list[dict[str, Any]]] = {}
    for sample in run.samples:
        by_iteration.setdefault(sample.get("iteration", 0), []).append(shown(sample))
    if not by_iteration:
        return None
    kept = fitting(list(by_iteration), [len(str(group)) for group in by_iteration.values()], PAGE_CHARACTERS)
    groups = [{"iteration": i, "version": by_iteration[i][0]["version"], "samples": by_iteration[i]} for i in kept]
    all_shown = [sample for group in groups for sample in group["samples"]]
    caption = "What the policy wrote in training, spread evenly over each iteration's prompts, not selected by reward."
    if len(kept) < len(by_iteration):
        caption += (
            f" {len(kept)} of {len(by_iteration)} iterations, so that the page stays small; samples.jsonl has all."
        )
    return Section(
        "samples",
        "Samples",
        "samples.html",
        caption=caption,
        groups=groups,
        count=len(all_shown),
        coloured=any("shade" in piece for sample in all_shown for piece in sample["pieces"]),
        turns=any(sample["turns"] for sample in all_shown),
        answers=any(sample["answer"] for sample in all_shown),
        edges=EDGES,
    )


def shown(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what the template reads of one record of `samples.jsonl`; what is missing or odd in it is left out."""
    reward = sample.get("reward")
    value = float(reward) if isinstance(reward, (int, float)) else None
    correct = sample.get("correct")
    good = correct if isinstance(correct, bool) else None if value is None else value > 0
    parts = sample.get("parts")
    listed = parts.items() if isinstance(parts, dict) and len(parts) > 1 else ()
    answer = sample.get("answer")
    pieces = pieces_of(sample)
    return {
        "prompt": shorten(sample.get("prompt", "")),
        "pieces": pieces,
        "stages": stages_of(sample),
        "turns": any(piece["said"] for piece in pieces),
        "answer": None if answer is None else shorten(answer),
        "reward": "not scored" if reward is None else number(reward) if value is not None else str(reward),
        "value": value,
        "version": sample.get("version"),
        "tone": "" if good is None else "good" if good else "bad",
        "parts": [f"{name} {part if isinstance(part, str) else number(part)}" for name, part in listed],
    }


def pieces_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a completion in stretches of text: what an environment said, and tokens by the shade of their log-ratio.

    Each has `text` and `said` (by the environment); a coloured one has `shade`, -3 to 3, and the log-ratios it is of.

    >>> sample = {"completion": "ab c", "token_lengths": [1, 1, 2], "log_ratio": [0.0, -0.3, None]}
    >>> [(piece["text"], piece.get("shade")) for piece in pieces_of(sample)]
    [('a', None), ('b', -2), (' c', None)]
    """
    text = str(sample.get("completion", ""))
    whole = text[:CHARACTERS_SHOWN]
    rest = f" … ({len(text) - len(whole)} more characters)" if len(text) > len(whole) else ""
    lengths, ratios = _numbers(sample.get("token_lengths")), _numbers(sample.get("log_ratio"))
    said = {i for start, end in _spans(sample.get("environment")) for i in range(start, min(end, len(lengths)))}
    pieces: list[dict[str, Any]] = []
    position = 0
    for i, length in enumerate(lengths):
        piece = whole[position : position + max(int(length or 0), 0)]
        position += len(piece)
        d = ratios[i] if i < len(ratios) else None
        level = 0 if d is None or i in said else sum(abs(d) >= edge for edge in EDGES) * (1 if d > 0 else -1)
        if piece:
            _add(pieces, piece, i in said, level, d)
    if whole[position:]:
        _add(pieces, whole[position:], bool(pieces) and pieces[-1]["said"] and len(lengths) - 1 in said, 0, None)
    if rest:
        _add(pieces, rest, False, 0, None)
    return pieces


def stages_of(sample: dict[str, Any]) -> list[tuple[int, str]]:
    """Return how a completion of masked diffusion came about: steps, from 1, and the text after each, `·` for masks.

    At most `STAGES` of them, evenly spread, the first and the last among them; none of other completions.

    >>> stages_of({"completion": "abc", "token_lengths": [1, 1, 1], "unmasked_at": [1, 0, 1]})
    [(1, '·b·'), (2, 'abc')]
    """
    text, lengths = str(sample.get("completion", "")), _numbers(sample.get("token_lengths"))
    when = [None if step is None else int(step) for step in _numbers(sample.get("unmasked_at"))]
    steps = sorted({step for step in when if step is not None and step >= 0})
    if len(when) != len(lengths) or not steps or len(text) > CHARACTERS_SHOWN:
        return []
    stages = []
    for step in fitting(steps, [1] * len(steps), STAGES):
        shown, position = "", 0
        for length, at in zip(lengths, when, strict=True):
            piece = text[position : position + int(length or 0)]
            position += len(piece)
            shown += piece if at is not None and at <= step else re.sub(r"[^\n]", "·", piece)
        stages.append((step + 1, shown))
    return stages


def _add(pieces: list[dict[str, Any]], text: str, said: bool, level: int, d: float | None) -> None:
    if level:
        pieces.append({"text": text, "said": said, "shade": level, "ratio": f"{d:+.3f}"})
    elif pieces and pieces[-1]["said"] == said and "shade" not in pieces[-1]:
        pieces[-1]["text"] += text
    else:
        pieces.append({"text": text, "said": said})


def fitting(keys: Sequence[Any], sizes: Sequence[int], room: int) -> list[Any]:
    """Return as many keys, evenly spread with the first and the last, as have room.

    >>> fitting([1, 2, 3, 4, 5], [10] * 5, 30), fitting([1, 2], [10, 10], 20), fitting([1, 2, 3], [99] * 3, 1)
    ([1, 3, 5], [1, 2], [3])
    """
    for count in range(len(keys), 1, -1):
        chosen = [round(i * (len(keys) - 1) / (count - 1)) for i in range(count)]
        if sum(sizes[i] for i in chosen) <= room:
            return [keys[i] for i in chosen]
    return list(keys[-1:])


def shorten(text: Any) -> str:
    """Return a text with at most `CHARACTERS_SHOWN` characters, and how many more there are."""
    text = str(text)
    cut = len(text) - CHARACTERS_SHOWN
    return text if cut <= 0 else f"{text[:CHARACTERS_SHOWN]} … ({cut} more characters)"


def _numbers(values: Any) -> list[float | None]:
    listed = values if isinstance(values, list) else []
    return [value if isinstance(value, (int, float)) else None for value in listed]


def _spans(values: Any) -> list[tuple[int, int]]:
    listed = values if isinstance(values, list) else []
    pairs = [one for one in listed if isinstance(one, list) and len(one) == 2]
    return [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
