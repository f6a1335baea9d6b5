"""`lit-qrl models`: what docs/models.md, which ships, says of a family of models under every format."""

import re
import textwrap
from collections.abc import Iterator

from lit_qrl.errors import ConfigError, listed, nearest
from lit_qrl.shipped import SHIPPED

WIDTH = 118


def models(*family: str) -> None:
    """Show which number formats work for every family of models; for a named one, of each method, and why others not.

    `auto` is the learner's dtype.

    Examples:
      lit-qrl models
      lit-qrl models Qwen3
      lit-qrl models "Gemma 3" gpt_oss

    Args:
        family: a name of the list, in any spelling.

    Raises:
        ConfigError: for a family that was not measured.
    """
    page = (SHIPPED / "docs" / "models.md").read_text(encoding="utf-8")
    sections = [section.splitlines() for section in page.split("\n## ")]
    names = [row[0] for row in _rows(sections[1])[1:]]
    chosen = [_found(name, names) for name in family]
    for name in chosen or names:
        print(f"\n{name}")
        for line in _told(name, sections):
            if chosen or re.match(r"\w+, (fit|two publishes):", line):
                print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    if not chosen:
        print("\nlit-qrl models FAMILY   shows the formats of each method, and why others are refused")


def _found(name: str, names: list[str]) -> str:
    """Return the family of a name, whatever case and dashes it is written with."""
    plain = {re.sub(r"[^a-z0-9]", "", one.lower()): one for one in names}
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    if wanted not in plain:
        # A name of the hub has its family's in it, of which the longest is the nearest: Qwen3-MoE before Qwen3.
        within = max((known for known in plain if known in wanted), key=len, default=None)
        meant = f"Did you mean {plain[within]!r}?" if within else nearest(name, names)
        if begins := [one for known, one in plain.items() if known.startswith(wanted)]:
            meant = f"Choose one of {listed(begins)}."
        raise ConfigError(
            f"{name!r} is no family that was measured.",
            remedy=f"{meant} A model of another family may work all the "
            "same: `lit-qrl fit … --dry_run` says what is refused before weights are loaded.",
        )
    return plain[wanted]


def _rows(section: list[str]) -> list[list[str]]:
    """Return the cells of a section's table, its head first."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section if line.startswith("|")]
    return [row for row in rows if set("".join(row)) - set("-| ")]


def _told(name: str, sections: list[list[str]]) -> Iterator[str]:
    """Yield a line for each column of the tables that have the family, and for each refusal."""
    for section in sections:
        heads, *rows = _rows(section) or [[]]
        for head, cell in (
            (head, cell) for row in rows if row[0] == name for head, cell in zip(heads, row, strict=True)
        ):
            formats = cell.split(", ")
            refused = [one.strip("~") for one in formats if one.startswith("~~")]
            works = ", ".join(one for one in formats if not one.startswith("~~")).strip("`") or "nothing"
            if head != "family":
                place = f"{section[0].partition(',')[0]}, {head}"
                yield f"{place}: {works}" + (f"; refused: {', '.join(refused)}" if refused else "")
        for line in section:
            if line.startswith("- ") and name in line[2:].partition(" (")[0].split(", "):
                yield f"Refused {line.partition(' (')[2].replace('): ', ': ', 1)}"
