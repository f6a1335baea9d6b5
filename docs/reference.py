"""Pages of reference for mkdocs: one for each room of lit_qrl, made from the docstrings of its modules."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lit_qrl"
HIDDEN = {"aliases"}
"""Modules that only hold former names."""


def rooms() -> dict[str, list[str]]:
    """Return the dotted names of the public modules of every room, in the order of their names."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in HIDDEN and not any(part.startswith("_") for part in parts):
            found.setdefault(parts[0], []).append(".".join(("lit_qrl", *parts)))
    return dict(sorted(found.items()))


def page(room: str, modules: list[str]) -> str:
    """Return a room's page."""
    return "\n\n".join([f"# {room}", *(f"::: {name}" for name in modules)]) + "\n"


def on_config(config: Any) -> Any:
    """Put the rooms at the end of the navigation."""
    config.nav.append({"Classes and functions": [{room: f"reference/{room}.md"} for room in rooms()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add their pages, which exist nowhere else."""
    from mkdocs.structure.files import File

    for room, modules in rooms().items():
        files.append(File.generated(config, f"reference/{room}.md", content=page(room, modules)))
    return files
