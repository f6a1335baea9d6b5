"""The run's numbers: `metrics.csv`, directly in the run folder, which survives crashes and resumes."""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_qrl.errors import named
from lit_qrl.run.event_log import METRICS_FILE, replacing
from lit_qrl.run.folder import set_aside


class RunCSVLogger(Logger):
    """Writes every logged row to `<save_dir>/metrics.csv`, in the layout of Lightning's own `CSVLogger`.

    The stock logger makes a new `version_n` folder for every process, or deletes the file that it finds; this one
    continues it. Rows are appended as they come. A metric that appears in the middle of a run adds a column: the file
    is then written anew beside the old one and replaces it at once, so that a crash at any moment leaves either.

    Args:
        save_dir: the run folder, usually `trainer.default_root_dir`.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> logger = RunCSVLogger(folder)
    >>> logger.log_metrics({"reward/mean": 0.25, "epoch": 0}, step=0)
    >>> logger.log_metrics({"val/accuracy": 0.5, "epoch": 0}, step=0)
    >>> print(Path(folder, "metrics.csv").read_text().strip())
    epoch,step,reward/mean,val/accuracy
    0,0,0.25,
    0,0,,0.5
    """

    def __init__(self, save_dir: str | os.PathLike) -> None:
        super().__init__()
        self._folder = Path(save_dir)
        self._columns: list[str] | None = None

    @property
    def name(self) -> str:
        """Empty, so that Lightning puts checkpoints into the run folder itself."""
        return ""

    version = name

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    log_dir = save_dir

    @property
    def path(self) -> Path:
        """The CSV file."""
        return self._folder / METRICS_FILE

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `config.yaml` is the record of a run."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append one row; a value may be a number or a tensor of one element."""
        row = {"step": step} if step is not None else {}
        row.update({name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()})
        columns = self._open()
        new = [name for name in row if name not in columns]
        if new or not self.path.exists():
            rows = self._read() if self.path.exists() else []
            self._columns = columns = sorted({*columns, *new}, key=lambda one: (one != "epoch", one != "step", one))
            self._replace(columns, [*rows, row])
            return
        with named(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_as_csv(columns, [row]))

    @rank_zero_only
    def resume(self, epoch: int, step: int) -> None:
        """Drop the rows that a resumed run will write again.

        Args:
            epoch: the first epoch to be run again; rows of earlier epochs stay.
            step: optimizer steps taken so far; decides for rows without an epoch.
        """
        if not self.path.exists():
            return
        self._open()
        rows = [row for row in self._read() if _is_before(row, epoch, step)]
        self._replace(self._columns or [], rows)

    @rank_zero_only
    def start_over(self) -> None:
        """Put the file of an earlier run aside as `metrics.1.csv` (or the next free number)."""
        self._columns = None
        if self.path.exists():
            set_aside(self.path)

    def _open(self) -> list[str]:
        """Return the file's columns; a last line without its end, left by a crash, is cut off once."""
        if self._columns is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            data = self.path.read_bytes() if self.path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                with replacing(self.path) as file:
                    file.write(whole)
            text = io.StringIO(whole.decode("utf-8", errors="replace"), newline="")
            self._columns = next(csv.reader(text), [])
        return self._columns

    def _read(self) -> list[dict[str, Any]]:
        with self.path.open(encoding="utf-8", errors="replace", newline="") as file:
            return list(csv.DictReader(file))

    def _replace(self, columns: list[str], rows: list[dict[str, Any]]) -> None:
        text = _as_csv(columns, [dict(zip(columns, columns, strict=True)), *rows])
        with replacing(self.path) as file:
            file.write(text.encode("utf-8"))


def _as_csv(columns: list[str], rows: list[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


def _is_before(row: Mapping[str, Any], epoch: int, step: int) -> bool:
    try:
        if row.get("epoch"):
            return int(float(row["epoch"])) < epoch
        return int(float(row.get("step") or 0)) < step
    except ValueError:
        return True
