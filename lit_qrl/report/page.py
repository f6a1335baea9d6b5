"""How a page is filled in from the templates beside this file, which escape every text that comes from a run."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lit_qrl.report.seeds import standard_error

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
    reload_seconds: float | None = None,
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
        reload_seconds=reload_seconds,
    )
    index = folder / "index.html"
    partial = folder / ".index.html.partial"
    partial.write_text(html, encoding="utf-8", errors="replace")
    partial.replace(index)  # a browser that loads it meanwhile gets the whole page
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


def fewer_colors(png: bytes) -> bytes:
    """Return a plot with at most 256 colours, which takes about a third of the bytes."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256).save(small, format="png", optimize=True)
    return small.getvalue()
