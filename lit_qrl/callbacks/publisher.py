"""Publishes the learner's weights to the engine before each rollout, in the rollout format, and proves they arrived.

The engine holds the sampler of a rollout, the weights of an evaluation, or nothing that is known (`_held`); what a new
engine is published when one dies is what was published last (`_wanted`). It takes weights between two draws; one that
is sent them while it draws with others stands still when they are there (`_to_stop`, `_paused`).
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl import formats
from lit_qrl.callbacks.report import Report
from lit_qrl.errors import ConfigError, MemoryShortageError, within_memory
from lit_qrl.formats.base import NumberFormat
from lit_qrl.loop.contracts import Learner
from lit_qrl.loop.hooks import RLCallback, overrides, rl_callbacks
from lit_qrl.network.adapters import lost_in_merge
from lit_qrl.network.shards import is_sharded
from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.precision.source import Change, unchanged
from lit_qrl.publish.delivery import AdapterBeside, Delivery, loaded, tell_shares, write_layers
from lit_qrl.publish.probe import check_scores
from lit_qrl.publish.spec import sampler_spec, source_of, trained_source
from lit_qrl.receipts.ledger import PublishError, PublishReport
from lit_qrl.rollout.engine import EngineDiedError, Pauses
from lit_qrl.run.event_log import event
from lit_qrl.run.stop import stop_run, stop_where_short
from lit_qrl.strategies.colocated import begin_rollout, begin_update

PUBLISH_REMEDY = (
    "The sampler's weights come beside the learner's: publish in a format of fewer bits, lower the engine's share "
    "(data.engine.gpu_memory_utilization, data.engine.cache_gigabytes), or take turns on the device by "
    "trainer.strategy: ColocatedStrategy."
)


class _DrawFailedError(Exception):
    """The engine died of what it drew while weights were on their way to it, for whatever reason."""

    def __init__(self, error: EngineDiedError) -> None:
        self.error = error


Weights = Literal["rollout", "evaluation"]


class WeightPublisher(RLCallback):
    """Keeps the sampler's weights what the run says they are.

    Before every n-th iteration it streams the learner's weights, layer by layer, through the callbacks' `on_publish`,
    the number format and the engine's loader, and raises the version. Before every evaluation it publishes the clean
    weights, which is not counted as a version. Under a precision plugin of this library the very codes of the
    learner's forward pass go out.

    Args:
        format: number format of the sampler's linear layers; `auto` is what the precision plugin exports, else the
            learner's own dtype (in VLLMEngine the one that it computes in: bf16 under bf16-mixed).
        every_n_iterations: iterations between publishes; more than 1 trains on a stale sampler. A resumed run begins
            with a publish, so it does not repeat what an uninterrupted one does.
        evaluation_format: `auto` evaluates the policy that is trained: in the precision plugin's format where the
            learner computes in it (QATAligned, UnifiedFP8), else in the learner's dtype, so that tables compare
            policies; `learner` takes the unquantized master weights under those plugins too, `rollout` the sampler's
            format. An engine that holds one format evaluates in that.
        exclude: name patterns of linear layers that stay unquantized, beside embeddings, head and routers.
        quantize_head: publish the output head in the format too, which engines read once per token; the embedding never
            is. It adds to the mismatch.
        unaligned: allow a format that differs from the precision plugin's own.
        on_fault: what follows when a publish did not arrive as sent: `stop` the run, or `retry` once and then stop.
        lora: `merged` publishes the sum of base and adapter; `adapter` the base once, then only adapter and perturbed
            norms; `auto` is `adapter` under NVFP4LoRA, whose base stays packed, else `merged`.
        probe_every: publishes between two scorings of the same tokens by engine and learner, the first included;
            0 never compares.
        max_restarts: times in a row that an engine which died (crash, out of memory, a step that hangs) is built
            again; one more ends the run, with a checkpoint.
    """

    def __init__(
        self,
        format: NumberFormat | str = "auto",
        every_n_iterations: int = 1,
        evaluation_format: Literal["auto", "learner", "rollout"] = "auto",
        exclude: list[str] | None = None,
        quantize_head: bool = False,
        unaligned: bool = False,
        on_fault: Literal["stop", "retry"] = "stop",
        lora: Literal["auto", "merged", "adapter"] = "auto",
        probe_every: int = 50,
        max_restarts: int = 2,
    ) -> None:
        for name, value, least in (
            ("every_n_iterations", every_n_iterations, 1),
            ("probe_every", probe_every, 0),
            ("max_restarts", max_restarts, 0),
        ):
            if value < least:
                raise ConfigError(f"publisher.{name} is too small.", expected=f"at least {least}", given=value)
        self.format: NumberFormat | None = None if format == "auto" else formats.get(format)
        self.every_n_iterations, self.probe_every, self.max_restarts = every_n_iterations, probe_every, max_restarts
        self.evaluation_format, self.exclude, self.lora = evaluation_format, tuple(exclude or ()), lora
        self.quantize_head, self.unaligned, self.on_fault = quantize_head, unaligned, on_fault
        self.version = -1
        self.baseline: float | None = None
        """What the first probe of the run measured."""
        self._deaths = 0
        """Of the engine, since it last drew everything that it was asked for."""
        self.evaluated_in = ""
        """Formats of the sampler that was evaluated last."""
        self._published, self._published_at = 0, -1
        self._wanted: Weights = "rollout"
        self._to_stop: Literal["pause", "settle"] | None = None
        """How the engine comes to stand still in the middle of a publish: between two steps, or when all is drawn."""
        self._paused = False
        """True while the engine stands still in the middle of what it draws."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Check everything that can be known before a weight is loaded; see `sampler_spec`."""
        self.learner: Learner = pl_module
        self.engine, self.schedule = self.learner.data.engine, self.learner.data.schedule
        self._disconnect()  # the stage before has closed its engine
        self.spec = sampler_spec(self, self.learner, partial(self._hung, trainer, pl_module))

    # ------------------------------------------------------------------------------------------------- what is due when

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Publish this iteration's sampler where one is due; else wake the engine that holds it."""
        if not self.schedule.due(trainer.current_epoch, trainer.max_epochs):
            return  # the engine draws with what it holds, or has drawn already
        if trainer.current_epoch % self.every_n_iterations == 0 or self._held != "rollout":
            with self._engine_between_draws(), self.learner.iteration.timed("publish"):
                self.version += 1
                self._publish("rollout")
            return
        try:
            begin_rollout(trainer, self.engine)
        except EngineDiedError as error:
            self.on_engine_died(trainer, pl_module, error)
        except MemoryShortageError as error:
            stop_where_short(trainer, error, save=True)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Give the engine the current clean weights, which count as no version."""
        self._settle()
        self._publish("evaluation")

    on_test_start = on_predict_start = on_validation_start

    def on_generation_end(self, trainer: Trainer, module: Learner) -> None:
        """Give the device back to the learner: all that was asked for is drawn.

        An engine that dies of falling asleep is freed, and built again at the next publish.
        """
        try:
            begin_update(trainer, module)
            self._deaths = 0
        except EngineDiedError as error:
            self._bury(error)
            begin_update(trainer, module)
        except MemoryShortageError as error:
            stop_where_short(trainer, error, save=True)

    def on_engine_died(self, trainer: Trainer, module: Learner, error: EngineDiedError) -> bool:
        """Build the engine again and publish what it held; stop the run when it keeps dying."""
        self._bury(error)
        with module.iteration.timed("publish"):
            if self._wanted == "rollout":  # a sampler that was kept over updates cannot be had back: a new version
                self.version += self._published_at != trainer.global_step
            self._publish(self._wanted)
        return True

    # ----------------------------------------------------------------------------------- an engine that draws meanwhile

    @contextmanager
    def _engine_between_draws(self) -> Iterator[None]:
        """Let the engine come to the end of what it draws; or, where weights may come in flight, of its step.

        An engine that is sent weights meanwhile does so when they are there.
        """
        if self.schedule.drawing and self._held == "rollout" and isinstance(self.engine, Pauses):
            self._to_stop = "pause" if self.schedule.in_flight and not self.schedule.failed else "settle"
        else:
            self._settle()
        whole = False
        try:
            yield
            whole = True
        finally:
            self._to_stop = None
            self._resume(whole)

    def _settle(self) -> None:
        """Wait for what is drawn ahead: an engine takes weights between two draws."""
        with self.learner.iteration.timed("wait") if self.schedule.drawing else nullcontext():
            error = self.schedule.settle(self.learner)
        if error is not None:
            self._bury(error)

    def _stand_still(self) -> None:
        """Wait, in the middle of a publish, until the engine can take what it was sent."""
        how, self._to_stop = self._to_stop, None
        if how is None:
            return
        with self.learner.iteration.timed_apart("wait", "publish"):
            if how == "pause":
                assert isinstance(self.engine, Pauses)
                self.engine.pause()
                self._paused = True
            elif (error := self.schedule.settle(self.learner)) is not None:
                raise _DrawFailedError(error)

    def _resume(self, whole: bool) -> None:
        """Let an engine go on that stands still, with verified weights; or let what it draws end."""
        paused, self._paused = self._paused, False
        if paused:
            assert isinstance(self.engine, Pauses)
            self.engine.resume(whole)

    # ------------------------------------------------------------------------------------------------------ publishing

    def _publish(self, what: Weights) -> None:
        """Publish, once more where `on_fault` says so, and to a new engine where this one dies of it.

        Raises:
            PublishError: of the last attempt.
            StoppedError: when memory ran out on the sender's side.
            ConfigError: of the first that raises one.
        """
        trainer, attempts = self.learner.trainer, 0
        retries = 1 if self.on_fault == "retry" else 0
        self._wanted, self._held = what, None
        while True:
            attempts += 1
            try:
                if attempts > 1:  # nobody knows what became of the first
                    self._stand_still()
                report = self._once(what)
                break
            except _DrawFailedError as failed:
                self._bury(failed.error)
            except EngineDiedError as error:
                self._bury(error)
            except MemoryShortageError as error:
                stop_where_short(trainer, error, save=True)
            except (PublishError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                if self._connection is not None:  # whatever arrived, the next publish sends everything
                    self._connection.forget()
                faults = [fault.kind for fault in getattr(error, "faults", ())]
                event(trainer, "publish_fault", str(error), faults=faults)
                if not retries:
                    raise
                retries -= 1
        self._held = what
        if what == "rollout":
            self._note(report)

    def _once(self, what: Weights) -> PublishReport:
        staged, engine = nullcontext(), self.engine
        if self._to_stop is not None and isinstance(engine, Pauses):
            staged = engine.staged(self._stand_still)
        seconds, start = self.learner.iteration.seconds, time.perf_counter()
        before = seconds["wait"]
        connection = self._connected()
        begin_rollout(self.learner.trainer, engine)
        if not engine.holds_weights:
            connection.forget()
        with staged, within_memory("publishing the weights to the engine", PUBLISH_REMEDY):
            report = self._rollout(connection) if what == "rollout" else self._evaluation(connection)
        report.seconds = time.perf_counter() - start - (seconds["wait"] - before)
        if what == "evaluation":
            self.evaluated_in = loaded(report)
        return report

    def _rollout(self, connection: AdapterBeside) -> PublishReport:
        """Publish what callbacks make of the learner's weights in the rollout format; compare log-probs where due."""
        learner, trainer = self.learner, self.learner.trainer
        perturbing = [callback for callback in rl_callbacks(trainer) if overrides(callback, "on_publish")]
        # A learner in parts scores through the strategy's hooks alone, not layer by layer in a format.
        network, merged = learner.policy.network, self.spec.adapter is None
        every = self.probe_every
        due = every > 0 and (self._published % every == 0 or self._rebuilt)
        compared = due and not is_sharded(network)
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

        report, source = self._sampler(connection, change), connection.source
        if compared:
            self.baseline = check_scores(learner, self.engine, source, merged, altered, self.version, self.baseline)
        # and once there is an update: an adapter begins at zero and has nothing to lose
        asked = compared or (self._published == 1 and not is_sharded(network))
        if asked and merged and learner.policy.lora is not None and not source.packed:
            plain = source.plain_dtype(self.engine.plain_dtype) or next(network.parameters()).dtype
            with suppress(torch.OutOfMemoryError):  # a number on the page ends no run
                lost = lost_in_merge(network, lambda weight: weight.to(plain))
                learner.iteration.metrics.update({"publish/merge_lost": lost})
        return report

    def _evaluation(self, connection: AdapterBeside) -> PublishReport:
        """Publish the clean weights, in what `evaluation_format` says."""
        source, delivery = connection.source, connection.delivery
        learner, engine, choice = self.learner, self.engine, self.evaluation_format
        # Base and adapter side by side are the packed learner's own arithmetic.
        beside_base = self.spec.adapter is not None and source.packed
        if choice == "rollout" or engine.single_format or beside_base:
            return self._sampler(connection, unchanged)
        connection.forget()
        trained = trained_source(learner.policy, learner.trainer.precision_plugin) if choice == "auto" else None
        if trained is None:
            return delivery.weights(source.plain(engine.plain_dtype), None, source.shapes, self.version)
        stream = trained.whole(unchanged, trained.plain_dtype(engine.plain_dtype))
        return delivery.weights(stream, trained.format, trained.shapes, self.version)

    def _sampler(self, connection: AdapterBeside, change: Change) -> PublishReport:
        """Publish in the rollout format, the adapter beside its base or merged into it."""
        source, delivery = connection.source, connection.delivery
        if self.spec.adapter is not None:
            return connection.publish(change, self.version)
        stream = source.whole(change, source.plain_dtype(self.engine.plain_dtype))
        return delivery.weights(stream, source.format, source.shapes, self.version)

    def _note(self, report: PublishReport) -> None:
        """Log a rollout's publish; of the first, write and tell what was loaded."""
        trainer, self._rebuilt = self.learner.trainer, False
        self._published_at = trainer.global_step
        self.schedule.published(report.version, trainer.current_epoch)
        self.learner.iteration.metrics.update(
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

    # ------------------------------------------------------------------------------------------------------ the engine

    def _connected(self) -> AdapterBeside:
        """Return the connection to the engine; the first call sets it up."""
        if self._connection is None:
            spec, policy = self.spec, self.learner.policy
            plugin, exclude = self.learner.trainer.precision_plugin, self.exclude
            source = source_of(policy, plugin, spec.format, exclude, spec.quantize_head)
            self.engine.setup(spec, policy)
            self._connection = AdapterBeside(source, Delivery(self.engine, self.learner.iteration.timed))
        return self._connection

    def _bury(self, error: EngineDiedError) -> None:
        """Count a death, and free what is left of the engine; stop the run when it was one too many."""
        self._resume(whole=False)  # others draw on, in flight with weights that this publish began to replace
        drawn = self.schedule.settle(self.learner)
        if drawn is not None and not self.schedule.in_flight:
            error = drawn  # what it died of, where another call found it gone
        self._disconnect()
        self._deaths += 1
        trainer, limit = self.learner.trainer, self.max_restarts
        plugin, again = trainer.precision_plugin, self._deaths <= limit
        what = f"restart {self._deaths} of {limit}" if again else f"{limit} restarts did not help"
        if isinstance(plugin, QuantizedPrecision) and plugin.share_weights:
            again, what = False, "the learner read the engine's own weights, so nothing is left to build it from"
        if self.engine.draws_together:
            again, what = False, "it was one with those of other processes, which this one cannot build again alone"
        event(trainer, "engine_died", f"{error} ({what})", restart=self._deaths, max_restarts=limit)
        if not again:
            stop_where_short(trainer, error, " in the engine", save=True)
            stop_run(trainer, "engine_died", f"{error} ({what}).", save=True, error=error)
        cause: BaseException | None = error
        while cause is not None:  # frames of the dead engine hold its memory
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        self.engine.discard()

    def _disconnect(self) -> None:
        """Forget everything about an engine that is gone."""
        self._connection: AdapterBeside | None = None
        """What lasts as long as one engine, from its start to its death."""
        self._held: Weights | None = None
        """What the engine holds, as far as is known."""
        self._rebuilt = True
        """True until the first rollout's publish to an engine."""

    def _hung(self, trainer: Trainer, module: Any, sentence: str) -> None:
        """Leave a diary and a report behind; the engine ends the process after this."""
        event(trainer, "engine_hung", sentence)
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Report):
                callback.on_exception(trainer, module, EngineDiedError(sentence))

    def state_dict(self) -> dict[str, Any]:
        """Return the published version and what the probe measured first."""
        return {"version": self.version, "probe": self.baseline}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the numbering and the probe's bound."""
        self.version, self.baseline = state_dict["version"], state_dict.get("probe")
