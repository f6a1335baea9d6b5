"""A progress bar that moves during generation, and one line for every iteration."""

import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lit_qrl.run.description import Described

STALLED_SECONDS = 0.05
"""Below this much time a rate of tokens would be noise."""


class Column(NamedTuple):
    """One column of the lines: heading, width in characters, metric, kind (`number`, `small`, `rate`, `seconds`)."""

    heading: str
    width: int
    metric: str
    kind: str = "number"


COLUMNS = (
    Column("reward", 6, "reward/mean"),
    Column("accuracy", 8, "val/accuracy"),
    Column("greedy", 6, "val/greedy_pass@1"),
    Column("KL", 7, "mismatch/kl_k3", "small"),
    Column("ESS", 5, "mismatch/ess_ratio"),
    Column("α", 5, "correction/alpha"),
    Column("tok/s", 6, "rollout/tokens_per_second", "rate"),
    Column("rollout", 7, "time/rollout", "seconds"),
    Column("score", 5, "time/score", "seconds"),
    Column("update", 6, "time/update", "seconds"),
)
"""With the iteration in front they fit into the 80 columns of a plain terminal."""

SUBSTITUTES = {"mismatch/kl_k3": "mismatch/kl_k1"}
"""What is shown when a metric is not logged."""


class RLProgress(Described, ProgressBar):
    """Shows what the run is doing now, and prints each iteration as a line of a table.

    On a terminal two bars stand under the lines: the iterations, and the present phase (sequences drawn and tokens per
    second during rollout and evaluation, micro-batches during the update). Anywhere else, such as in a log file, only
    the lines are printed, without control characters. `trainer.enable_progress_bar: false` leaves it all out.

    Args:
        header_every: lines between two repetitions of the table's head.
        refresh_per_second: how often the bars are drawn, at most.

    Raises:
        ValueError: when one of the two is not positive.
    """

    def __init__(self, header_every: int = 20, refresh_per_second: float = 4.0) -> None:
        super().__init__()
        if header_every < 1 or refresh_per_second <= 0:
            raise ValueError(
                "header_every and refresh_per_second must be positive, "
                f"got {header_every} and {refresh_per_second}; leave them out for the defaults."
            )
        self.header_every, self.refresh_per_second = header_every, refresh_per_second
        self._enabled = True
        self._live: Any = None
        self._tasks: dict[str, Any] = {}
        self._lines = 0
        self._ran = False
        self._pending: int | None = None
        self._evaluated: dict[str, float] = {}
        self._evaluated_since = False
        """Whether there was an evaluation since the last line."""
        self._generation: tuple[str, int, int, int] | None = None
        self._first = (0, 0.0)
        self._train_started: tuple[float, int] | None = None

    # -------------------------------------------------------------------------------------------- Lightning's contract

    def enable(self) -> None:
        """Show from now on."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing from now on."""
        self._enabled = False
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bars."""
        if self._live is not None:
            self._live.console.print(*args, markup=False, highlight=False)
        elif self._enabled:
            print(*args, **kwargs)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the last known value of every logged metric, as numbers."""
        found = {**self._evaluated, **trainer.logged_metrics, **trainer.callback_metrics}
        return {name: float(value) for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluation, so that a resumed run can show it in its last line."""
        return {"evaluated": dict(self._evaluated)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the last evaluation."""
        self._evaluated = dict(state_dict["evaluated"])

    # ---------------------------------------------------------------------------------------------------------- phases

    def update_generation(self, stage: str, done: int, total: int, tokens: int) -> None:
        """Move the bar during generation.

        Args:
            stage: `rollout`, or the evaluation that asks and behind a space which of its sets and how.
            done: finished sequences.
            total: sequences of this generation.
            tokens: tokens drawn so far in it.
        """
        if self._live is None:
            return
        now, before = time.perf_counter(), self._generation
        if before is None or before[:2] != (stage, total) or done < before[2] or tokens < before[3]:
            self._first = (tokens, now)
        self._generation = (stage, total, done, tokens)
        first_tokens, started = self._first
        rate = (tokens - first_tokens) / (now - started) if now - started > STALLED_SECONDS else 0.0
        note = f"{rate:,.0f} tokens/s" if rate > 0 else ""
        phase, name = ("rollout", "") if stage == "rollout" else ("evaluate", stage.partition(" ")[2])
        if done >= total:
            self._phase("score" if phase == "rollout" else "judge", 0, None)
        else:
            self._phase(phase, done, total, " ".join(filter(None, ("sequences", name, note))))

    def update_scoring(self, reward: str, done: int, total: int) -> None:
        """Move the bar while a slow reward judges.

        Args:
            reward: its name.
            done: samples judged.
            total: samples.
        """
        self._phase("reward", done, total, f"samples judged by {reward}")

    def _phase(self, name: str, done: int, total: int | None, note: str = "") -> None:
        if self._live is None:
            return
        note = note if total is None else f"{done}/{total} {note}"
        self._live.update(self._tasks["phase"], description=name, completed=done, total=total or 1, note=note)

    def _update(self, done: int) -> None:
        total = self.total_train_batches
        self._phase("update", done, int(total) if math.isfinite(total) else None, "micro-batches")

    def _iterations(self, trainer: Trainer, done: int) -> None:
        if self._live is None:
            return
        total = _planned(trainer)
        note = str(done) if total is None else f"{done}/{total}"
        if total is not None and self._train_started is not None:
            began, first = self._train_started
            if done > first:
                each = (time.perf_counter() - began) / (done - first)
                note += f" {timedelta(seconds=round(each * (total - done)))} left"
        self._live.update(self._tasks["run"], completed=done, total=total or 1, note=note, visible=True)

    # ---------------------------------------------------------------------------------------------------------- hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the bars."""
        self._start()
        self._iterations(trainer, trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line of the iteration before, whose metrics are complete only now."""
        self._flush(trainer, pl_module)
        self._ran = False
        self._generation = None
        if self._train_started is None:
            self._train_started = (time.perf_counter(), trainer.current_epoch)
        self._iterations(trainer, trainer.current_epoch)
        self._phase("publish", 0, None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Show the update."""
        self._ran = True
        self._update(batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the update's bar; after the last micro-batch a line is due, of which an iteration cut short has none."""
        self._update(batch_idx + 1)
        if trainer.is_last_batch:
            self._pending = trainer.current_epoch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last line, with the last evaluation whenever that was, and take the bars away."""
        self._evaluated_since = True
        self._flush(trainer, pl_module)
        self._stop()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the evaluation."""
        self._start()
        self._phase("evaluate", 0, None)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line of the untrained policy."""
        if trainer.state.fn != "fit":
            return
        metrics = self.get_metrics(trainer, pl_module)
        self._evaluated = {name: value for name, value in metrics.items() if name.startswith("val/")}
        self._evaluated_since = True
        if not self._ran and trainer.current_epoch == 0 and not trainer.sanity_checking:
            self._line(trainer, 0, self._evaluated)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the bars away, so that the error can be read."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the bars away."""
        self._stop()

    # ---------------------------------------------------------------------------------------------------------- output

    def _flush(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pending is not None:
            self._line(trainer, self._pending + 1, self.get_metrics(trainer, pl_module))
            self._pending = None

    def _line(self, trainer: Trainer, iteration: int, metrics: Mapping[str, float]) -> None:
        if not self._enabled:
            return
        total = _planned(trainer)
        if self._lines % self.header_every == 0:
            self._write(header(total), "dim")
        self._lines += 1
        if not self._evaluated_since:
            metrics = {name: value for name, value in metrics.items() if not name.startswith("val/")}
        self._evaluated_since = False
        self._write(line(iteration, total, metrics), "")

    def _write(self, text: str, style: str) -> None:
        if self._live is not None:
            self._live.console.print(
                text, style=style, markup=False, highlight=False, no_wrap=True, overflow="ignore", crop=False
            )
        else:
            print(text, flush=True)

    def _start(self) -> None:
        if not self._enabled or self._live is not None or not sys.stdout.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=sys.stdout)
        if console.is_dumb_terminal:
            return
        self._live = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            refresh_per_second=self.refresh_per_second,
            transient=True,
        )
        self._live.start()
        self._tasks = {
            "run": self._live.add_task("iteration", total=1, note="", visible=False),
            "phase": self._live.add_task("", total=1, note=""),
        }

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def header(total: int | None) -> str:
    """Return the head of the table.

    >>> header(150)
    '   iter reward accuracy greedy      KL   ESS     α  tok/s rollout score update'
    """
    return " ".join([f"{'iter':>{_iteration_width(total)}}", *(f"{c.heading:>{c.width}}" for c in COLUMNS)])


def line(iteration: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """Return one iteration as a line of the table; a metric that was not logged is a dash.

    >>> line(7, 150, {"reward/mean": 0.5, "mismatch/kl_k3": 0.00012, "time/rollout": 0.618})
    '  7/150  0.500        -      - 0.00012     -     -      -   0.62s     -      -'
    """
    count = f"{iteration}/{total}" if total is not None else str(iteration)
    benchmark = next((value for name, value in metrics.items() if fnmatchcase(name, "val/*/pass@1")), None)
    if benchmark is not None and not {"val/accuracy", "val/greedy_pass@1"} & metrics.keys():
        metrics = {**metrics, "val/accuracy": benchmark}  # where the task's own problems are not evaluated on
    cells = [f"{count:>{_iteration_width(total)}}"]
    for column in COLUMNS:
        value = metrics.get(column.metric, metrics.get(SUBSTITUTES.get(column.metric, "")))
        cells.append(f"{cell(value, column.width, column.kind):>{column.width}}")
    return " ".join(cells)


def cell(value: float | None, width: int, kind: str = "number") -> str:
    """Return a number in at most `width` characters where it can be, `nan` and `inf` as they are.

    >>> cell(0.724, 6), cell(0.0000321, 7, "small"), cell(81234.0, 6, "rate"), cell(12.34, 6, "seconds")
    ('0.724', '3.2e-05', '81234', '12.3s')
    """
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if kind == "rate":
        text = f"{value:.0f}"
    elif kind == "seconds":
        text = f"{value:.{2 if size < 10 else 1 if size < 100 else 0}f}s"
    elif 0 < size < (1e-4 if kind == "small" else 1e-3):
        text = f"{value:.1e}"
    else:
        text = f"{value:.{5 if kind == 'small' and size < 1 else 3 if size < 10 else 2 if size < 100 else 1}f}"
    return text if len(text) <= width else f"{value:.0e}"


def _iteration_width(total: int | None) -> int:
    return max(7, 2 * len(str(total)) + 1 if total is not None else 0)


def _planned(trainer: Trainer) -> int | None:
    planned = trainer.max_epochs
    return planned if planned is not None and planned > 0 else None
