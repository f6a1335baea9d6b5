"""Rows from files, folders, the hub and a program's memory, with errors that say what is there instead."""

import csv
import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lit_qrl.errors import ConfigError, nearest
from lit_qrl.network.hub import ask_hub

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


class MemoryRows:
    """Rows that a Python program holds: a `datasets.Dataset`, a list of dictionaries, any iterable of them, read once.

    Of several sets by the names of their splits (a `DatasetDict`), the split decides. A configuration holds neither;
    it has their number and a digest of them, by which a run that goes on sees that they are others.

    Args:
        given: the rows.

    Raises:
        ConfigError: for what holds no rows.

    >>> rows = MemoryRows({"question": f"{i}+1=", "answer": str(i + 1)} for i in range(3))
    >>> str(rows), rows.read("train")[2]
    ('<3 rows of Python, ad6f453ff9>', {'question': '2+1=', 'answer': '3'})
    """

    def __init__(self, given: Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        sets = dict(given) if isinstance(given, Mapping) else {"": given}
        self.sets = {str(name): _as_rows(rows) for name, rows in sets.items()}

    def read(self, split: str) -> list[dict[str, Any]]:
        """Return the rows, of several sets those of a split."""
        return self.sets[""] if "" in self.sets else _of_split(self.sets, split, "The data set")

    def __str__(self) -> str:
        digest = blake2b(digest_size=5)
        for name, rows in self.sets.items():
            digest.update(name.encode())
            for row in rows:
                digest.update(json.dumps(row, default=str, sort_keys=True).encode())
        return f"<{sum(map(len, self.sets.values()))} rows of Python, {digest.hexdigest()}>"


def _of_split(sets: Mapping[Any, Any], split: str, what: str) -> Any:
    if split not in sets:
        names = [str(name) for name in sets]
        raise ConfigError(
            f"{what} has no split {split!r}.", expected=", ".join(names), given=split, remedy=nearest(split, names)
        )
    return sets[split]


def _as_rows(given: Any) -> list[dict[str, Any]]:
    rows = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes)) else None
    strange = next((one for one in rows or () if not isinstance(one, Mapping)), None)
    if rows is None or strange is not None:
        raise ConfigError(
            "The data set is no rows.",
            expected="a path, a datasets.Dataset, or an iterable of dictionaries",
            given=type(given).__name__ if rows is None else f"{type(given).__name__} of {type(strange).__name__}",
        )
    return [dict(row) for row in rows]


def read_rows(path: str, split: str = "train", subset: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a data set as dictionaries.

    Args:
        path: a `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` file; a folder in any form that the `datasets` library
            reads or has saved; or a name on its hub.
        split: of a folder or hub data set; a file is read whole.
        subset: configuration of a hub data set.

    Raises:
        ConfigError: nothing is there (names the nearest that is), it cannot be read, or it has no rows.
    """
    if path.startswith("<"):
        raise ConfigError(
            f"The rows {path} were in a Python program's memory, and a configuration does not hold them.",
            expected="a file, a folder, or a hub name",
            remedy="Run that program again; or write the rows to a file (Dataset.to_json) and name it.",
        )
    place = Path(path).expanduser()
    if place.is_dir():
        saved = (place / "dataset_dict.json").is_file() or (place / "state.json").is_file()
        rows = _read_library(str(place), split, subset, saved)
    elif place.is_file():
        rows = _read_file(place)
    elif (
        place.suffix.lower() in _READERS
        or path.startswith((".", "~", "/"))
        or (place.parent != Path() and place.parent.is_dir())
    ):
        folder = place.absolute().parent
        close = difflib.get_close_matches(place.name, os.listdir(folder), n=1) if folder.is_dir() else []
        near = f"{folder} {'has no file of such a name' if folder.is_dir() else 'does not exist either'}."
        raise ConfigError(
            f"The data file {path!r} does not exist.",
            expected="an existing file or folder",
            given=f"{place.absolute()}",
            remedy=f"Did you mean {str(place.parent / close[0])!r}?" if close else near,
        )
    elif _HUB_NAME.fullmatch(path):
        ask_hub(f"the data set {path!r} (split {split!r})")
        rows = _read_library(path, split, subset, saved=False)
    else:
        raise ConfigError(f"{path!r} is no data set.", expected="a file, a folder, or a hub name such as openai/gsm8k")
    if not rows:
        raise ConfigError(
            f"The data set {path!r} is empty.", expected="at least one row", given=f"0 rows in {place.name!r}"
        )
    return rows


def _read_file(place: Path) -> list[dict[str, Any]]:
    reader = _READERS.get(place.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"The kind of the data file {place} is unknown.",
            expected=f"a name that ends in {', '.join(_READERS)}",
            given=place.suffix or "no ending",
            remedy="Rename or convert the file.",
        )
    try:
        rows = reader(place)
    except (OSError, ValueError, RecursionError) as error:  # UnicodeDecodeError and pyarrow's own are ValueErrors
        raise ConfigError(
            f"The data file {place} cannot be read.",
            expected=f"valid {place.suffix[1:]} in UTF-8",
            given=str(error).rstrip("."),
            remedy="Correct it, or convert it: a .jsonl file has one object per line.",
        ) from error
    wrong = next((i for i, row in enumerate(rows, start=1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise ConfigError(
            f"Row {wrong} of {place} is not a row.", expected="an object with columns", given=repr(rows[wrong - 1])[:80]
        )
    return rows


def _read_jsonl(place: Path) -> list[Any]:
    rows = []
    with place.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"line {number}, which is not JSON: {line[:80].strip()}") from error
    return rows


def _read_json(place: Path) -> list[Any]:
    data = json.loads(place.read_text(encoding="utf-8-sig"))
    if not isinstance(data, list):
        raise ValueError(f"a {type(data).__name__}, where a list of objects stands alone")
    return data


def _read_table(delimiter: str) -> Callable[[Path], list[Any]]:
    def read(place: Path) -> list[Any]:
        with place.open(encoding="utf-8-sig", newline="") as file:  # every cell stays text: "0140" keeps its zero
            reader = csv.DictReader(file, delimiter=delimiter)
            return [{name: value for name, value in row.items() if name is not None} for row in reader]

    return read


def _read_parquet(place: Path) -> list[Any]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(place).to_pylist()


_READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_table(","),
    ".tsv": _read_table("\t"),
    ".parquet": _read_parquet,
}


def _read_library(path: str, split: str, subset: str | None, saved: bool) -> list[dict[str, Any]]:
    import datasets

    try:
        if saved:
            loaded: Any = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = _of_split(loaded, split, f"The data set {path!r}")
        else:
            loaded = datasets.load_dataset(path, subset, split=split)
    except ConfigError:
        raise
    except Exception as error:  # the library raises errors of many kinds, its own and those of the network
        reason = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"The data set {path!r} (split {split!r}) cannot be loaded.",
            expected="a folder or a hub data set that exists and can be reached",
            given=f"{type(error).__name__}: {reason[0][:300]}",
            remedy="Check the name, the split and the subset; without a network, give a file.",
        ) from error
    return list(loaded)


def check_columns(rows: Sequence[dict[str, Any]], columns: Sequence[str], source: str) -> None:
    """Raise `ConfigError` when the first row lacks a column."""
    present = list(rows[0])
    for column in columns:
        if column not in present:
            raise ConfigError(
                f"The data set {source!r} has no column {column!r}.",
                expected=f"one of its columns: {', '.join(map(str, present))}",
                given=column,
                remedy=nearest(column, map(str, present)),
            )
