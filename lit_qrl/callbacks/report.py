"""Keeps samples of what the policy writes, and makes the report when the run ends, however it ends."""

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lit_qrl.errors import FULL, ConfigError, StoppedError, not_written
from lit_qrl.loop.hooks import RLCallback, overrides, rl_callbacks
from lit_qrl.report import render
from lit_qrl.run.event_log import SAMPLES_FILE, append_jsonl, as_jsonl, event, log_event, number, read_jsonl, replacing
from lit_qrl.run.folder import set_aside, shown
from lit_qrl.run.interrupt import Interrupted, InterruptedTogether, deadline
from lit_qrl.run.loggers import RunCSVLogger
from lit_qrl.types import RolloutBatch

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

log = logging.getLogger(__name__)

LAST_PAGE = 10.0
"""Seconds for the page of a run whose process is ended."""
TOKENS_TOLD = 2048
"""Of a sample, those whose log-ratios are kept: more than the page shows of one."""


class Report(RLCallback):
    """Writes `samples.jsonl`, the event log's beginning and end, and `report/index.html` in the run folder.

    A sample has its texts, its reward, the gold answer, the log-ratio of each of its tokens, which of them an
    environment said, and of masked diffusion the step at which each was unmasked; it is written when its iteration has
    been trained on.

    The page is made at the end of `fit`, at an error and at an interrupt. It is made from files, so that one that
    cannot be made loses nothing: `lit-qrl report RUN_FOLDER` makes it again.

    Args:
        every_n_iterations: also make the report while the run goes on, every so many iterations, in a process of its
            own; 0 makes it at the end only.
        samples_per_iteration: completions kept of each rollout, spread evenly over its prompts.

    Raises:
        ConfigError: for a negative number.
    """

    def __init__(self, every_n_iterations: int = 0, samples_per_iteration: int = 4) -> None:
        for name, value in (
            ("every_n_iterations", every_n_iterations),
            ("samples_per_iteration", samples_per_iteration),
        ):
            if value < 0:
                raise ConfigError(f"report.{name} counts, so it cannot be negative.", expected="0 or more", given=value)
        self.every_n_iterations, self.samples_per_iteration = every_n_iterations, samples_per_iteration
        self._active = False
        self._ended = False
        self._kept: list[tuple[int, dict[str, Any]]] = []
        self._page: subprocess.Popen[bytes] | None = None
        self._texts: dict[int, str] = {}

    # ----------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """See to it that `metrics.csv` is written, whatever logger was chosen."""
        self._active, self._ended = False, False
        wanted = stage == "fit" and not trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]
        if wanted and trainer.loggers and not any(isinstance(one, RunCSVLogger) for one in trainer.loggers):
            trainer.loggers = [*trainer.loggers, RunCSVLogger(trainer.default_root_dir)]

    def on_train_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Open the event log; put the files of an earlier run aside, or go on with those of the resumed one."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        self._active, self._texts = True, {}
        deadline.last_words[:] = [partial(self._last_words, trainer)]
        folder = Path(trainer.default_root_dir)
        done = trainer.fit_loop.epoch_progress.current.processed  # pyright: ignore[reportAttributeAccessIssue]
        resumed = done > 0 or trainer.global_step > 0
        tables = [one for one in trainer.loggers if isinstance(one, RunCSVLogger)]
        if resumed:
            for table in tables:
                table.resume(epoch=done, step=trainer.global_step)
            _drop_samples(folder / SAMPLES_FILE, after=done)
        else:
            for table in tables:
                table.start_over()
            if (folder / SAMPLES_FILE).exists():
                set_aside(folder / SAMPLES_FILE)
        names = [type(callback).__name__ for callback in rl_callbacks(trainer) if overrides(callback, "correct")]
        message = f"Resumed after iteration {done}." if resumed else "Training started."
        log_event(
            folder,
            "resume" if resumed else "start",
            message,
            iteration=done,
            corrections=names,
            device=_device(trainer),
            parameters=sum(parameter.numel() for parameter in pl_module.parameters()),
        )

    def on_rollout_end(self, trainer: Trainer, module: "GRPOModule", batch: RolloutBatch) -> None:
        """Keep a few samples."""
        if self._active and self.samples_per_iteration and len(batch):
            self._kept = list(
                _samples(module, batch, trainer.current_epoch + 1, self.samples_per_iteration, self._texts)
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "GRPOModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the samples once learner_old's log-probs of them are known."""
        if self._kept and trainer.is_last_batch:
            measured = pl_module.iteration.measured()
            if measured is not None and measured.learner_old_logprobs is not None:
                for row, sample in self._kept:
                    sample["log_ratio"] = _log_ratios(measured, row, len(sample["token_lengths"]))
            self._write(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Begin the report of the iterations so far, when due; the last one's metrics are logged by now."""
        done = trainer.current_epoch
        if not (self._active and self.every_n_iterations and done and done % self.every_n_iterations == 0):
            return
        with pl_module.iteration.timed("report"):
            if self._page is not None and self._page.poll() is None:  # one at a time
                return
            if self._page is not None and self._page.returncode:
                again = shown(trainer.default_root_dir)
                log.warning("A report could not be made; see why with: lit-qrl report %s", again)
            self._page = _page_apart(trainer.default_root_dir)

    def on_train_end(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Close the event log."""
        if self._active:
            self._write(trainer)
            log_event(trainer.default_root_dir, "finish", "Training ended.", iteration=trainer.current_epoch)
            self._ended = True

    def on_exception(self, trainer: Trainer, pl_module: "GRPOModule", exception: BaseException) -> None:
        """Say in the event log what happened, and make the report of what there is."""
        deadline.arrived()
        if not self._active:
            return
        with self._only_told():
            self._write(trainer)
        if not self._ended:
            interrupt = isinstance(exception, (KeyboardInterrupt, SIGTERMException, InterruptedTogether))
            kind, what = ("interrupt", "Interrupted") if interrupt else ("exception", "Stopped by an error")
            text = f"{what}: {type(exception).__name__}: {exception}".removesuffix(": ")
            if isinstance(exception, (Interrupted, InterruptedTogether)):
                text = f"Interrupted by {signal.Signals(exception.number).name}."
            with self._only_told():
                event(trainer, kind, text)
        with self._only_told():
            self._finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Make the report and say where it is."""
        if not self._active:
            return
        try:
            self._finish(trainer)
        except OSError as error:
            why, folder = not_written(error.filename or "The report", error), trainer.default_root_dir
            raise StoppedError(f"Training has ended. {why} Make the report with: lit-qrl report {folder}") from error

    # --------------------------------------------------------------------------------------------------------- details

    def _last_words(self, trainer: Trainer, number: int) -> None:
        """Make the report of a run that code of a user does not let end."""
        text = f"Interrupted by {signal.Signals(number).name}, which the code of the run did not let through."
        with self._only_told():
            event(trainer, "interrupt", text)
        self._end_page()
        with suppress(subprocess.TimeoutExpired):
            _page_apart(trainer.default_root_dir).wait(LAST_PAGE)

    def _end_page(self) -> None:
        """Stop a page that is being made: the one of the run's end comes instead."""
        if self._page is not None:
            self._page.kill()
            self._page.wait()
            self._page = None

    def _finish(self, trainer: Trainer) -> None:
        self._end_page()
        try:
            index = self._render(trainer)
        except OSError:
            self._active = False
            raise
        self._active = False  # a signal that comes before is no reason to have none
        deadline.last_words.clear()
        if index is not None:
            print(f"Report: {shown(index)}", flush=True)

    def _render(self, trainer: Trainer) -> Path | None:
        folder = trainer.default_root_dir
        try:
            return render(folder)
        # Whatever is wrong with a plot must not cost the run its checkpoint or hide the error that ended it.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            log.warning(
                "The report could not be made (%s: %s); the run's files are whole.", type(error).__name__, error
            )
            log.warning("Try again with: lit-qrl report %s", shown(folder))
            why = f"The report could not be made: {type(error).__name__}: {error}"
            log_event(folder, "report", why)
            return None

    def _write(self, trainer: Trainer) -> None:
        kept, self._kept = self._kept, []
        append_jsonl(Path(trainer.default_root_dir) / SAMPLES_FILE, [sample for _, sample in kept])

    @staticmethod
    @contextmanager
    def _only_told() -> Iterator[None]:
        """Say what could not be written where the run ends by another error, which is what its command tells."""
        try:
            yield
        except OSError as error:
            log.warning("%s", not_written(error.filename or "A file of the run", error))


def _page_apart(folder: str) -> "subprocess.Popen[bytes]":
    """Begin to make the report of a run folder in a process that holds no GPU, and one thread of the host."""
    return subprocess.Popen(
        [sys.executable, "-m", "lit_qrl.cli", "report", folder],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path),  # where the run has it from
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run
    )


def _samples(
    module: "GRPOModule", batch: RolloutBatch, iteration: int, wanted: int, texts: dict[int, str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows of a rollout, spread evenly, and what is kept of each."""
    s, t = batch.tokens.shape[1], batch.mask.shape[1]
    count = min(wanted, len(batch))
    decode, problems = module.policy.decode, module.iteration.problems
    solved = module.data.solved(batch.reward_parts) if problems else None
    steps = batch.unmasked_at
    for row in (i * len(batch) // count for i in range(count)):
        ids = batch.tokens[row].tolist()
        used = batch.mask[row].nonzero()
        unscored = bool(batch.rewards[row].isnan())  # whose tokens are masked
        end = t if unscored else int(used.max()) + 1 if len(used) else 0
        completion = ids[s - t : s - t + end]
        answer = module.data.task.reference(problems[int(batch.group[row])].row) if problems else None
        yield (
            row,
            {
                "iteration": iteration,
                "version": int(batch.version[row]),
                "prompt": decode(ids[s - t - int(batch.prompt_length[row]) : s - t]),
                "completion": decode(completion),
                "answer": None if answer is None else str(answer),
                "reward": number(batch.rewards[row]),
                "parts": {name: number(values[row]) for name, values in batch.reward_parts.items()},
                "correct": None if solved is None or unscored else bool(solved[row]),
                "token_lengths": token_lengths(decode, completion[:TOKENS_TOLD], texts),
                "environment": [] if unscored else _spans(~batch.mask[row, :end]),
                **({} if batch.versions is None else {"versions": runs_of(batch.versions[row, :end].tolist())}),
                **({} if steps is None else {"unmasked_at": steps[row, : len(completion[:TOKENS_TOLD])].tolist()}),
            },
        )


def runs_of(versions: list[int]) -> list[list[int]]:
    """Return versions as pairs: one, and how many tokens in a row it drew.

    >>> runs_of([4, 4, 4, 5])
    [[4, 3], [5, 1]]
    """
    return [[version, len(list(tokens))] for version, tokens in groupby(versions)]


def token_lengths(decode: Callable[[list[int]], str], ids: list[int], texts: dict[int, str] | None = None) -> list[int]:
    """Return how many characters of the text each token adds; the last token of a character has all of it.

    Args:
        decode: token ids to text.
        ids: of the text.
        texts: of single tokens that are known, to which others are added.

    >>> token_lengths(lambda ids: bytes(ids).decode(errors="replace"), [*"a".encode(), *"é".encode(), *"b".encode()])
    [1, 0, 1, 1]
    """
    texts = {} if texts is None else texts
    texts.update({i: decode([i]) for i in set(ids) - texts.keys()})
    alone = [texts[i] for i in ids]
    if "".join(alone) == decode(ids):
        return [len(text) for text in alone]
    lengths, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):  # in the context of the tokens before, without those that are long past
        before, now = decode(ids[start:read]), decode(ids[start:end])
        added = 0 if now.endswith("\ufffd") and end < len(ids) else max(len(now) - len(before), 0)
        if added:
            start, read = read, end
        lengths.append(added)
    return lengths


def _spans(marked: Tensor) -> list[list[int]]:
    """Return [start, end) of each run of True."""
    runs = runs_of(marked.tolist())
    ends = accumulate(length for _, length in runs)
    return [[end - length, end] for end, (is_marked, length) in zip(ends, runs, strict=True) if is_marked]


def _log_ratios(measured: RolloutBatch, row: int, count: int) -> list[float | None]:
    """Return the log-ratios of a sequence's first tokens, None where there is none."""
    learner_old = measured.learner_old_logprobs
    if learner_old is None:
        return []
    d, mask = (learner_old - measured.sampler_logprobs)[row, :count].tolist(), measured.mask[row, :count].tolist()
    return [
        round(value, 4) + 0.0 if used and math.isfinite(value) else None for value, used in zip(d, mask, strict=True)
    ]


def _drop_samples(path: Path, after: int) -> None:
    """Drop the samples of iterations that a resumed run draws again."""
    if not path.exists():
        return
    samples = read_jsonl(path)
    kept = [sample for sample in samples if not isinstance(i := sample.get("iteration"), int) or i <= after]
    with replacing(path) as file:
        file.write(as_jsonl(kept).encode("utf-8", errors="surrogatepass"))


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return name if trainer.world_size == 1 else f"{trainer.world_size} × {name}"
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' if threads > 1 else ''}"
