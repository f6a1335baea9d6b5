"""Which run was meant by a folder that is none."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from lit_qrl.run.folder import is_run, number, oldest_first

SHOWN = 5
"""Runs that are listed as a choice."""


def meant(given: Path, runs: Path = Path("runs")) -> str:
    """Return a sentence that names the run that was meant, or those to choose from.

    Args:
        given: a folder that is no run: one that holds runs, a misspelt one, or any other.
        runs: where runs are when none is near `given`.
    """
    inside = _newest(given)
    if inside:
        return _choose(inside)
    beside = {path.name: path for path in _folders(given.parent)}
    others = [name for name in beside if name != given.name and not number(given)]
    for name in difflib.get_close_matches(given.name, others):
        found = [beside[name]] if is_run(beside[name]) else _newest(beside[name])
        if found:
            return _choose(found[-1:])
    return _choose(_newest(given.parent) or _newest(runs)) or "lit-qrl fit makes one, under runs/."


def _newest(folder: Path) -> list[Path]:
    """Return the last run in a folder, or of each of its folders."""
    inside = _folders(folder)
    own = oldest_first(path for path in inside if is_run(path))
    if own:
        return own[-1:]
    deeper = (oldest_first(path for path in _folders(one) if is_run(path)) for one in inside)
    return [found[-1] for found in deeper if found]


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("[!.]*") if path.is_dir())


def _choose(runs: Iterable[Path]) -> str:
    names = [str(run) for run in runs]
    if len(names) == 1:
        return f"Did you mean {names[0]}?"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"Choose one of {', '.join(names[:SHOWN])}{more}." if names else ""
