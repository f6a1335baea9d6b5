"""The parts that a report page is made of; every piece of text that comes from a run is escaped here."""

import base64
import html
import math
from collections.abc import Sequence
from typing import Any

STYLE = """
:root{color-scheme:light dark;--page:#f4f5f8;--card:#fff;--text:#1d222c;--soft:#5b6473;--line:#e3e6ec;--accent:#2f6be0;
--good:#14774f;--good-bg:#e2f5ec;--bad:#b3313f;--bad-bg:#fce8ea;--warn:#8a5a00;--warn-bg:#fdf1d9;--code:#f4f5f8}
@media(prefers-color-scheme:dark){:root{--page:#0e1015;--card:#171a21;--text:#e4e8f0;--soft:#98a1b2;--line:#272c36;
--accent:#7ba6ff;--good:#6fd3a5;--good-bg:#12301f;--bad:#ff9aa5;--bad-bg:#3a191e;
--warn:#f0c36a;--warn-bg:#352a10;--code:#10131a}}
*{box-sizing:border-box}html{scroll-behavior:smooth}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 24px 64px}
header h1{font-size:27px;line-height:1.2;letter-spacing:-.015em;margin:0;display:inline;overflow-wrap:anywhere}
header .pill{margin-left:10px;vertical-align:4px}
header p{margin:8px 0 0;color:var(--soft)}
nav{display:flex;flex-wrap:wrap;gap:2px 18px;margin:22px 0 14px;font-size:13.5px}
nav a{color:var(--soft);text-decoration:none}nav a:hover{color:var(--accent);text-decoration:underline}
.name{white-space:nowrap;font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(188px,1fr));gap:12px;margin:0 0 22px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:13px 16px 12px}
.tile.wide{grid-column:span 2}.tile .label{font-size:12px;color:var(--soft)}
.tile .value{font-size:22px;font-weight:600;letter-spacing:-.015em;line-height:1.35;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile .value.long{font-size:16px;line-height:1.5;padding:3px 0}
.tile .note{font-size:12.5px;color:var(--soft);font-variant-numeric:tabular-nums}
.up{color:var(--good)}.down{color:var(--bad)}
.card{padding:20px 22px;margin:0 0 18px}
h2{font-size:17px;letter-spacing:-.005em;margin:0 0 2px}
.caption{margin:0 0 12px;color:var(--soft);font-size:13.5px;max-width:118ch}
img{display:block;width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);text-align:left;font-size:12px;padding:6px 12px 6px 0;
border-bottom:1px solid var(--line)}
td{vertical-align:top;padding:8px 12px 8px 0;border-bottom:1px solid var(--line)}
tbody tr:last-child td{border-bottom:0}
th.n,td.n{text-align:right}
tr.group td{padding-top:18px;font-weight:600;color:var(--text);border-bottom:1px solid var(--line)}
tr.group td span{font-weight:400;color:var(--soft)}
pre,code{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}
td pre{max-height:320px;overflow:auto}
.scroll{overflow-x:auto}
.samples{table-layout:fixed}
.pill{display:inline-block;border-radius:999px;padding:1px 9px;font-size:12px;font-weight:600;
background:var(--line);color:var(--soft);white-space:nowrap}
.pill.good{background:var(--good-bg);color:var(--good)}
.pill.bad{background:var(--bad-bg);color:var(--bad)}.pill.warn{background:var(--warn-bg);color:var(--warn)}
.parts{color:var(--soft);font-size:12px;line-height:1.45;margin-top:4px}
details summary{cursor:pointer;font-weight:600;font-size:17px;letter-spacing:-.005em}
details summary span{font-weight:400;font-size:13.5px;color:var(--soft);margin-left:8px}
details[open] summary{margin-bottom:12px}
details pre{background:var(--code);border-radius:8px;padding:14px 16px;overflow:auto}
.swatch{display:inline-block;width:22px;height:3px;border-radius:2px;vertical-align:middle;margin-right:8px}
footer{color:var(--soft);font-size:12.5px;margin-top:28px}
@media print{body{background:#fff}.card{break-inside:avoid}td pre{max-height:none}}
"""

STATUS = {"finished": "good", "running": "", "interrupted": "warn", "failed": "bad"}


def page(title: str, body: str) -> str:
    """Return a whole HTML document without any outside resource."""
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def header(title: str, subtitle: str, status: str = "") -> str:
    """Return the heading of a page, with a coloured word for the run's status."""
    badge = f" {pill(status, STATUS.get(status, ''))}" if status in STATUS else ""
    return f"<header><h1>{html.escape(title)}</h1>{badge}<p>{html.escape(subtitle)}</p></header>"


def navigation(targets: Sequence[tuple[str, str]]) -> str:
    """Return links to the sections, given as (anchor, heading)."""
    return "<nav>" + "".join(f"<a href='#{key}'>{html.escape(text)}</a>" for key, text in targets) + "</nav>"


def tile(label: str, value: str, note: str = "", tone: str = "", wide: bool = False) -> str:
    """Return one number of the summary; `tone` (`up`, `down`) colours the note."""
    long = " long" if len(value) > 15 and not wide else ""
    below = f"<div class='note {tone}'>{html.escape(note)}</div>" if note else ""
    return (
        f"<div class='tile{' wide' if wide else ''}'><div class=label>{html.escape(label)}</div>"
        f"<div class='value{long}'>{html.escape(value)}</div>{below}</div>"
    )


def tiles(items: Sequence[str]) -> str:
    """Return the grid of the summary's tiles."""
    return f"<div class=tiles>{''.join(items)}</div>"


def card(key: str, heading: str, content: str, caption: str = "") -> str:
    """Return a section."""
    text = f"<p class=caption>{html.escape(caption)}</p>" if caption else ""
    return f"<section class=card id='{key}'><h2>{html.escape(heading)}</h2>{text}{content}</section>"


def folded(key: str, heading: str, note: str, content: str) -> str:
    """Return a section that opens at a click."""
    summary = f"<summary>{html.escape(heading)}<span>{html.escape(note)}</span></summary>"
    return f"<section class=card id='{key}'><details>{summary}{content}</details></section>"


def picture(light: bytes, dark: bytes, description: str) -> str:
    """Return an embedded PNG that follows the reader's colour scheme."""
    return (
        f"<picture><source media='(prefers-color-scheme: dark)' srcset='{_data(dark)}'>"
        f"<img src='{_data(light)}' alt='{html.escape(description, quote=True)}'></picture>"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Return a table of cells that are HTML already; `numeric` columns are aligned to the right."""
    classes = [" class=n" if i in numeric else "" for i in range(len(columns))]
    head = "".join(f"<th{c}>{html.escape(name)}</th>" for c, name in zip(classes, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>" for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def pill(text: str, tone: str = "") -> str:
    """Return a coloured word."""
    return f"<span class='pill {tone}'>{html.escape(text)}</span>"


def block(text: Any) -> str:
    """Return preformatted text."""
    return f"<pre>{html.escape(str(text))}</pre>"


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


def duration(seconds: float | None) -> str:
    """Return a time for reading.

    >>> duration(9.4), duration(128), duration(7300)
    ('9.4 s', '2 min 8 s', '2 h 1 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _data(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"
