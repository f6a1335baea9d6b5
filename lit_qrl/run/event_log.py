"""The run's event log: one JSON object per line in `events.jsonl`, appended and never rewritten."""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, SupportsFloat

from lit_qrl.errors import named

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


EVENTS_FILE, SAMPLES_FILE, METRICS_FILE = "events.jsonl", "samples.jsonl", "metrics.csv"
"""Names of the files in a run folder."""


def log_event(
    run_folder: str | os.PathLike, kind: str, message: str, *, iteration: int | None = None, **fields: Any
) -> None:
    """Append one event to `<run_folder>/events.jsonl`.

    The line is written by one call on a file opened for appending, so that several processes may log at once and a
    crash can cut the last line only.

    Args:
        run_folder: the folder of the run; made when missing.
        kind: a short word that groups events (`start`, `guard`, `checkpoint`, `interrupt`, …).
        message: one sentence for a person.
        iteration: the iteration it belongs to, counted from 1; 0 is before the first, None is outside of any.
        fields: anything else; tensors become numbers, non-finite numbers become strings.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> log_event(folder, "guard", "A loss was not finite.", iteration=3, loss=float("nan"))
    >>> event = read_jsonl(Path(folder) / EVENTS_FILE)[0]
    >>> event["iteration"], event["loss"]
    (3, 'nan')
    """
    record = {"time": time.time(), "iteration": iteration, "kind": kind, "message": message, **fields}
    append_jsonl(Path(run_folder) / EVENTS_FILE, [record])


def event(trainer: "Trainer", kind: str, message: str, **fields: Any) -> None:
    """Append one event of a Trainer's run to its event log, on the first rank; see `log_event`."""
    if trainer.is_global_zero:
        log_event(trainer.default_root_dir, kind, message, iteration=trainer.current_epoch + 1, **fields)


def tell(trainer: "Trainer", kind: str, message: str, **fields: Any) -> None:
    """Append an event to the event log and print its message beside the table, where there is one."""
    event(trainer, kind, message, **fields)
    if (bar := trainer.progress_bar_callback) is not None:
        bar.print(message)


def number(value: SupportsFloat) -> float | None:
    """Return a number as JSON has it, None for NaN.

    >>> number(float("nan")) is None, number(0.5)
    (True, 0.5)
    """
    value = float(value)
    return None if math.isnan(value) else value


def as_jsonl(records: Iterable[dict[str, Any]]) -> str:
    """Return records as lines of JSON."""
    return "".join(json.dumps(plain(record), ensure_ascii=False) + "\n" for record in records)


def append_jsonl(path: str | os.PathLike, records: Iterable[dict[str, Any]]) -> None:
    """Append records to a JSONL file, one line each.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "samples.jsonl"
    >>> append_jsonl(path, [{"reward": 1.0}, {"reward": 0.0}])
    >>> len(read_jsonl(path))
    2
    """
    lines = as_jsonl(records)
    if not lines:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path), path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a line that a crash has cut would swallow the next record
                lines = "\n" + lines
        file.write(lines.encode("utf-8", errors="surrogatepass"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a file that takes the place of another as a whole, once it is written and on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with named(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file in order; lines that cannot be read are left out, no file is no objects.

    >>> read_jsonl("no-such-file.jsonl")
    []
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return []
    records = []
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: tensors as numbers or lists, non-finite numbers and the rest as strings.

    >>> plain({"a": float("inf"), "b": (1, 2.5)})
    {'a': 'inf', 'b': [1, 2.5]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)
