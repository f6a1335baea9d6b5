"""A run's publishes, one after the other: before each rollout and evaluation, and again when the engine died of one."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_qrl.errors import MemoryShortageError, listed, within_memory
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.loop.ahead import Ahead
from lit_qrl.loop.hooks import Learner, overrides, rl_callbacks
from lit_qrl.network.shards import is_sharded
from lit_qrl.precision.source import Change, WeightSource, unchanged
from lit_qrl.publish.adapter import AdapterBeside
from lit_qrl.publish.delivery import Delivery, Stages
from lit_qrl.publish.probe import ScoreCheck
from lit_qrl.publish.recovery import Restarts, repeated
from lit_qrl.publish.source import source_of, trained_source
from lit_qrl.publish.spec import PublishSettings, sampler_spec
from lit_qrl.receipts.ledger import PublishReport
from lit_qrl.rollout.engine import EngineDiedError, Sleeps
from lit_qrl.rollout.pauses import Pauses
from lit_qrl.run.event_log import tell
from lit_qrl.run.stop import stop_run, stop_where_short
from lit_qrl.strategies.colocated import begin_rollout, begin_update

PUBLISH_REMEDY = (
    "The sampler's weights come beside the learner's: publish in a format of fewer bits, lower the engine's share "
    "(data.engine.gpu_memory_utilization, data.engine.cache_gigabytes), or take turns on the device by "
    "trainer.strategy: ColocatedStrategy."
)


class Connection(NamedTuple):
    """What lasts as long as one engine, from its start to its death."""

    source: WeightSource
    delivery: Delivery
    beside: AdapterBeside


class _DrawFailedError(Exception):
    """The engine died of what it drew while weights were on their way to it, for whatever reason."""

    def __init__(self, error: EngineDiedError) -> None:
        self.error = error


class Publisher:
    """Keeps the engine's weights what the settings say they are, and counts their versions.

    Args:
        settings: of the user.
    """

    def __init__(self, settings: PublishSettings) -> None:
        self.settings = settings
        self.version = -1
        self.scores = ScoreCheck(settings.probe_every)
        self._restarts = Restarts(settings.max_restarts)
        self._published, self._published_at = 0, -1
        self._paused = False
        """True while the engine stands still in the middle of what it draws."""
        self._again: Callable[[], None] | None = None
        self._still: Callable[[], None] | None = None
        """What waits until the engine stands still, while it draws and weights are on their way."""

    def prepare(self, learner: Learner, on_hang: Callable[[str], None]) -> None:
        """Check everything that can be known before a weight is loaded; see `sampler_spec`."""
        self.learner, self.engine = learner, learner.data.engine
        self._disconnect()  # the stage before has closed its engine
        self.spec = sampler_spec(self.settings, learner, on_hang)
        ahead = learner.data.ahead
        if ahead is not None and ahead.replay is not None and isinstance(self.engine, Pauses):
            ahead.replay.check_engines(self.engine.engines)

    # ------------------------------------------------------------------------------------------------- what is due when

    def begin_iteration(self) -> None:
        """Publish this iteration's sampler where one is due; else wake the engine that holds it."""
        trainer, ahead = self.learner.trainer, self.learner.data.ahead
        if ahead is not None:
            self._follow(ahead)
        if ahead is not None and not ahead.due(trainer.current_epoch, trainer.max_epochs):
            return  # the engine draws with what it holds, or has drawn already
        if (
            ahead is not None
            or trainer.current_epoch % self.settings.every_n_iterations == 0
            or not self._holds_rollout
        ):
            with self._engine_between_draws(), self.learner.iteration.timed("publish"):
                self.version += 1
                self._publish_rollout()
        else:
            try:
                begin_rollout(trainer, self.engine)
            except EngineDiedError as error:
                self.revive(error)
            except MemoryShortageError as error:
                stop_where_short(trainer, error, save=True)

    def _follow(self, ahead: Ahead) -> None:
        """Have the engine stand still where that of the run stood which is followed; a new one, where it was one."""
        if ahead.begins_anew(self.learner):
            self._disconnect()
            self.engine.discard()
            self._published = 0
        ahead.follow(self.learner)

    def begin_evaluation(self) -> None:
        """Give the engine the current clean weights, which count as no version."""
        self._settle()
        self._again = self.begin_evaluation
        learner, engine, choice = self.learner, self.engine, self.settings.evaluation_format

        def publish(connection: Connection) -> PublishReport:
            source, delivery, beside = connection
            # Base and adapter side by side are the packed learner's own arithmetic.
            beside_base = self.spec.adapter is not None and source.packed
            if choice == "rollout" or engine.single_format or beside_base:
                return self._sampler(connection, unchanged)
            beside.forget()
            trained = trained_source(learner.policy, learner.trainer.precision_plugin) if choice == "auto" else None
            if trained is None:
                return delivery.weights(source.plain(engine.plain_dtype), None, source.shapes(), self.version)
            stream = trained.whole(unchanged, trained.plain_dtype(engine.plain_dtype))
            return delivery.weights(stream, trained.format, trained.shapes(), self.version)

        self._repeated(publish)
        self._holds_rollout = False

    def end_generation(self) -> None:
        """Give the device back to the learner: all that was asked for is drawn.

        An engine that dies of falling asleep is freed, and built again at the next publish.
        """
        trainer = self.learner.trainer
        try:
            begin_update(trainer, self.learner)
            self._restarts.reset()
        except EngineDiedError as error:
            self._bury(error)
            begin_update(trainer, self.learner)
        except MemoryShortageError as error:
            stop_where_short(trainer, error, save=True)

    def revive(self, error: EngineDiedError) -> None:
        """Build the engine again and publish what it held; stop the run when it keeps dying."""
        self._bury(error)
        assert self._again is not None
        with self.learner.iteration.timed("publish"):
            self._again()

    @contextmanager
    def _engine_between_draws(self) -> Iterator[None]:
        """Let the engine come to the end of what it draws; or, where weights may come in flight, of its step.

        An engine that is sent weights meanwhile does so when they are there.
        """
        ahead = self.learner.data.ahead
        flies = ahead is not None and ahead.in_flight and self._holds_rollout and not ahead.failed
        if ahead is not None and ahead.drawing and self._holds_rollout and isinstance(self.engine, Stages):
            self._still = self._pause if flies else self._drawn
        elif flies:
            with self.learner.iteration.timed("wait"):
                self._pause()
        else:
            self._settle()
        whole = False
        try:
            yield
            whole = True
        finally:
            self._still = None
            self._resume(whole)

    def _pause(self) -> None:
        """Let the engine stand still between two of its steps."""
        assert isinstance(self.engine, Pauses)
        stands = self.engine.pause()
        self._paused = True
        self.learner.data.ahead.record.stood("publish", stands)

    def _drawn(self) -> None:
        """Wait for what is drawn ahead; raise what the engine died of."""
        error = self.learner.data.ahead.settle(self.learner)
        if error is not None:
            raise _DrawFailedError(error)

    def _stand_still(self) -> None:
        """Wait, in the middle of a publish, until the engine can take what it was sent."""
        still, self._still = self._still, None
        if still is not None:
            with self.learner.iteration.timed_apart("wait", "publish"):
                still()

    def _resume(self, whole: bool) -> None:
        """Let an engine go on that stands still, with verified weights; or let what it draws end."""
        paused, self._paused = self._paused, False
        if paused:
            assert isinstance(self.engine, Pauses)
            self.engine.resume(whole)

    def _settle(self) -> None:
        """Wait for what is drawn ahead: an engine takes weights between two draws."""
        ahead = self.learner.data.ahead
        if ahead is None:
            return
        with self.learner.iteration.timed("wait"):
            error = ahead.settle(self.learner)
        if error is not None:
            self._bury(error)

    # ------------------------------------------------------------------------------------------------------ publishing

    def _publish_rollout(self) -> None:
        learner, trainer = self.learner, self.learner.trainer
        self._holds_rollout = False
        self._again = self._publish_rollout_again
        perturbing = [callback for callback in rl_callbacks(trainer) if overrides(callback, "on_publish")]

        def publish(connection: Connection) -> PublishReport:
            # A learner in parts scores through the strategy's hooks alone, not layer by layer in a format.
            compared = self.scores.due(self._published, self._rebuilt) and not is_sharded(learner.policy.network)
            # Each attempt starts the callbacks anew: what a repeated one draws is what the first drew.
            for callback in rl_callbacks(trainer):
                callback.on_rollout_start(trainer, learner, self.version)
            altered: dict[str, Tensor] = {}

            def change(name: str, tensor: Tensor) -> Tensor:
                before = tensor
                for callback in perturbing:
                    tensor = callback.on_publish(trainer, learner, name, tensor)
                if tensor is not before:
                    altered[name] = tensor if tensor.ndim == 1 else tensor.new_empty(0)
                return tensor

            report = self._sampler(connection, change)
            if compared:
                merged = self.spec.adapter is None
                self.scores.check(learner, self.engine, connection.source, merged, altered, self.version)
            return report

        report = self._repeated(publish)
        self._holds_rollout, self._rebuilt = True, False
        self._published_at = trainer.global_step
        if learner.data.ahead is not None:
            learner.data.ahead.published(report.version, trainer.current_epoch)
        learner.iteration.metrics.update(
            {
                "publish/version": float(report.version),
                "publish/bytes": float(report.bytes),
                "publish/gigabytes_per_second": report.bytes / 1e9 / max(report.seconds, 1e-9),
                **{f"time/publish_{part}": seconds for part, seconds in report.parts.items()},
            }
        )
        if self._published == 0:
            write_layers(Path(trainer.default_root_dir), report)
            tell_shares(trainer, self.spec.format, report)
        self._published += 1

    def _publish_rollout_again(self) -> None:
        """Publish to a new engine; a sampler that was kept over updates cannot be had back and gets a new version."""
        self.version += self._published_at != self.learner.trainer.global_step
        self._publish_rollout()

    def _sampler(self, connection: Connection, change: Change) -> PublishReport:
        """Publish in the rollout format, the adapter beside its base or merged into it."""
        source, delivery, beside = connection
        if self.spec.adapter is not None:
            return beside.publish(change, self.version)
        stream = source.whole(change, source.plain_dtype(self.engine.plain_dtype))
        return delivery.weights(stream, source.format, source.shapes(), self.version)

    def _repeated(self, publish: Callable[[Connection], PublishReport]) -> PublishReport:
        """Publish, once more where `on_fault` says so, and to a new engine where this one dies of it."""
        attempts = 0

        def attempt() -> PublishReport:
            nonlocal attempts
            attempts += 1
            try:
                if attempts > 1:  # nobody knows what became of the first
                    self._stand_still()
                return self._once(publish)
            except _DrawFailedError as failed:
                raise failed.error from None

        def forget() -> None:  # whatever arrived, the next publish sends everything
            if self._connection is not None:
                self._connection.beside.forget()

        retries = 1 if self.settings.on_fault == "retry" else 0
        return repeated(attempt, self.learner.trainer, retries, forget, self._bury)

    def _once(self, publish: Callable[[Connection], PublishReport]) -> PublishReport:
        staged, engine = nullcontext(), self.engine
        if self._still is not None and isinstance(engine, Stages):
            staged = engine.staged(self._stand_still)
        seconds, start = self.learner.iteration.seconds, time.perf_counter()
        before = seconds["wait"]
        connection = self._connected()
        begin_rollout(self.learner.trainer, self.engine)
        if isinstance(self.engine, Sleeps) and not self.engine.holds_weights:
            connection.beside.forget()
        with staged, within_memory("publishing the weights to the engine", PUBLISH_REMEDY):
            report = publish(connection)
        report.seconds = time.perf_counter() - start - (seconds["wait"] - before)
        return report

    def _connected(self) -> Connection:
        """Return the connection to the engine; the first call sets it up."""
        if self._connection is None:
            spec, policy = self.spec, self.learner.policy
            plugin, exclude = self.learner.trainer.precision_plugin, self.settings.exclude
            source = source_of(policy, plugin, spec.format, exclude, spec.quantize_head)
            self.engine.setup(spec, policy)
            delivery = Delivery(self.engine, self.learner.iteration.timed)
            self._connection = Connection(source, delivery, AdapterBeside(source, delivery))
        return self._connection

    def _bury(self, error: EngineDiedError) -> None:
        """Count a death, and free what is left of the engine."""
        ahead = self.learner.data.ahead
        if ahead is not None:  # others draw on, in flight with weights that this publish began to replace
            self._resume(whole=False)
            drawn = ahead.settle(self.learner)
            if drawn is not None and not ahead.in_flight:
                error = drawn  # what it died of, where another call found it gone
        self._disconnect()
        if ahead is not None:
            ahead.record.died()
        if ahead is not None and ahead.replay is not None:
            stop_run(self.learner.trainer, "replay", f"An engine died of what is replayed: {error}.", error=error)
        self._restarts.died(self.learner.trainer, error, self.engine.draws_together)
        self.engine.discard()

    def _disconnect(self) -> None:
        """Forget everything about an engine that is gone."""
        self._connection: Connection | None = None
        self._holds_rollout = False
        """True while the engine holds the weights of the last rollout."""
        self._rebuilt = True
        """True until the first rollout's publish to an engine."""


@rank_zero_only
def write_layers(folder: Path, report: PublishReport) -> None:
    """Write `publish.json`: the format that every tensor of the first publish was loaded in, its bytes, the shares."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = ("version", "bytes", "quantized_share", "verified_share", "layers", "sizes")
    unverified = [] if report.received is None else report.received.unread
    content = {**{key: getattr(report, key) for key in keys}, "unverified": unverified}
    (folder / "publish.json").write_text(json.dumps(content, indent=1))


def tell_shares(trainer: Trainer, format: NumberFormat | None, report: PublishReport) -> None:
    """Print, and note in the diary, how much of the model the sampler has in the format and how much was verified."""
    what = "the learner's dtype" if format is None else format.name
    share = 1.0 if format is None or isinstance(format, Dense) else report.quantized_share
    unread = [] if report.received is None else report.received.unread
    left = f", not {listed(unread, 2)}" if report.verified_share < 1 and unread else ""
    line = f"Sampler: {share:.1%} of the parameters in {what}; {report.verified_share:.1%} of the bytes verified{left}."
    shares = {"quantized_share": report.quantized_share, "verified_share": report.verified_share}
    tell(trainer, "sampler", line, **shares)
