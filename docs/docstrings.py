"""An extension of griffe: doctests and tables of docstrings come out as they were written."""

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Return a docstring in which every paragraph that is a doctest or a table is a block of code."""
    lines: list[str] = []
    margin: str | None = None
    for line in [*text.split("\n"), ""]:
        start = line.lstrip()
        kind = "python" if start.startswith(">>> ") else "text" if start.startswith("====") else ""
        if kind and margin is None:
            margin = line[: len(line) - len(start)]
            if lines and lines[-1].strip():
                lines.append("")
            lines.append(f"{margin}```{kind}")
        if margin is not None and not start:
            lines.append(f"{margin}```")
            margin = None
        lines.append(line)
    return "\n".join(lines[:-1])


class Verbatim(griffe.Extension):
    """Fences them in every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
