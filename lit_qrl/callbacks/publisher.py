"""Publishes the learner's weights to the engine before each rollout, in the rollout format, and proves they arrived."""

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_qrl import formats
from lit_qrl.callbacks.guard import event
from lit_qrl.callbacks.report import Report
from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.loop.hooks import RLCallback, overrides, rl_callbacks
from lit_qrl.network.head import tied_head
from lit_qrl.publish.adapter import published_apart
from lit_qrl.publish.recovery import Restarts
from lit_qrl.publish.score_check import ScoreCheck
from lit_qrl.publish.source import WeightSource
from lit_qrl.receipts.ledger import (
    PublishError,
    SentLedger,
    TensorReceipt,
    choose,
    compare,
    compare_columns,
    compare_read_back,
)
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.strategies.colocated import begin_rollout, begin_update, check_phases
from lit_qrl.types import PublishReport

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule


class WeightPublisher(RLCallback):
    """Keeps the sampler's weights what the run says they are.

    Before every n-th iteration it streams the learner's weights, layer by layer, through the callbacks' `on_publish`,
    the number format and the engine's loader, and raises the version. Before every evaluation it publishes the clean
    weights, which is not counted as a version. Under a precision plugin of this library the very codes of the
    learner's forward pass go out.

    Args:
        format: number format of the sampler's linear layers; `auto` is what the precision plugin exports, else the
            learner's own dtype.
        every_n_iterations: iterations between publishes; more than 1 trains on a stale sampler.
        evaluation_format: `learner` evaluates in the learner's dtype, so that tables compare policies; `rollout` in
            the sampler's format.
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
        evaluation_format: Literal["learner", "rollout"] = "learner",
        exclude: list[str] | None = None,
        quantize_head: bool = False,
        unaligned: bool = False,
        on_fault: Literal["stop", "retry"] = "stop",
        lora: Literal["auto", "merged", "adapter"] = "auto",
        probe_every: int = 50,
        max_restarts: int = 2,
    ) -> None:
        if every_n_iterations < 1:
            raise ConfigError("publisher.every_n_iterations is too small.", expected="at least 1")
        if probe_every < 0:
            raise ConfigError("publisher.probe_every is negative.", expected="0 or more", given=probe_every)
        if max_restarts < 0:
            raise ConfigError("publisher.max_restarts is negative.", expected="0 or more", given=max_restarts)
        self.format = None if format == "auto" else formats.get(format)
        self.every_n_iterations, self.evaluation_format = every_n_iterations, evaluation_format
        self.exclude, self.quantize_head, self.unaligned = tuple(exclude or ()), quantize_head, unaligned
        self.on_fault, self.lora, self.scores = on_fault, lora, ScoreCheck(probe_every)
        self.version = -1
        self.last_report: PublishReport | None = None
        self._receipts: dict[Any, dict[str, TensorReceipt]] = {}
        self._source: WeightSource | None = None
        self._holds_rollout_weights = False
        self._published, self._published_at = 0, -1
        self._restarts, self._rebuilt = Restarts(max_restarts), False
        self._again: Callable[[], None] | None = None
        # What the engine holds in adapter mode: the base's state and layers, and which norms differ from it.
        self._base: tuple[Any, dict[str, str]] | None = None
        self._perturbed: set[str] = set()

    # ----------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Check the format against the precision plugin and the device, before any weight is loaded."""
        plugin = trainer.precision_plugin
        aligned: NumberFormat | None = getattr(plugin, "format", None)
        if self.format is not None and aligned is not None and self.format != aligned and not self.unaligned:
            raise ConfigError(
                "The sampler's format differs from the one that the learner computes in.",
                expected=f"publisher.format: auto (the plugin's {aligned.name})",
                given=self.format.name,
                remedy="Set publisher.unaligned to true to study the mismatch.",
            )
        self._rollout_format = self.format if self.format is not None else aligned
        same = aligned is not None and self._rollout_format == aligned
        if same and self.exclude:
            raise ConfigError(
                "The precision plugin says which layers are quantized, and the publisher too.",
                given=f"publisher.exclude: {', '.join(self.exclude)}",
                remedy="Move the patterns to the plugin's exclude.",
            )
        if self.quantize_head and same:
            raise ConfigError(
                "publisher.quantize_head would quantize a layer that the precision plugin computes in full precision.",
                expected="a learner without low-bit layers, or quantize_head: false",
                given=type(plugin).__name__,
                remedy="Leave out one of the two.",
            )
        if self.quantize_head and (self._rollout_format is None or isinstance(self._rollout_format, Dense)):
            raise ConfigError(
                "publisher.quantize_head has no format to quantize to.",
                expected="publisher.format of 8 or 4 bits",
                given="auto" if self._rollout_format is None else self._rollout_format.name,
                remedy="Choose one, such as fp8_row, or set quantize_head to false.",
            )
        config = getattr(pl_module.policy, "config", None)
        if self.quantize_head and config is not None and config.get_text_config().tie_word_embeddings:
            raise tied_head(config)  # before the weights are loaded
        engine, sampling = pl_module.data.engine, pl_module.data.sampling
        if self.every_n_iterations > 1 and getattr(engine, "share", None) == "auto":
            engine.share = "never"  # pyright: ignore[reportAttributeAccessIssue]  # the sampler outlives the update
        engine.exclude = tuple(getattr(plugin, "exclude", ())) if same else self.exclude
        engine.quantize_head = self.quantize_head
        self._apart = published_apart(self.lora, pl_module.policy.lora, engine, plugin, same, self.unaligned)
        check_phases(trainer, engine, self.every_n_iterations)
        engine.on_hang = partial(self._hung, trainer, pl_module)
        engine.validate(self._rollout_format, sampling)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Publish this iteration's sampler."""
        due = trainer.current_epoch % self.every_n_iterations == 0
        if due or not self._holds_rollout_weights:
            with pl_module.iteration.timed("publish"):
                self.version += 1
                self._publish_rollout(trainer, pl_module)
        else:
            begin_rollout(trainer, pl_module.data.engine)

    def on_validation_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Give the engine the current clean weights."""
        self._publish_evaluation(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Give the engine the current clean weights."""
        self._publish_evaluation(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Give the engine the current clean weights."""
        self._publish_evaluation(trainer, pl_module)

    def on_generation_end(self, trainer: Trainer, module: "GRPOModule") -> None:
        """Give the device back to the learner."""
        self._restarts.reset()
        begin_update(trainer, module)

    def on_engine_died(self, trainer: Trainer, module: "GRPOModule", error: EngineDiedError) -> bool:
        """Build the engine again and publish what it held; stop the run when it keeps dying."""
        self._bury(trainer, module, error)
        assert self._again is not None
        with module.iteration.timed("publish"):
            self._again()
        return True

    # ------------------------------------------------------------------------------------------------------ publishing

    def _publish_rollout(self, trainer: Trainer, module: "GRPOModule") -> None:
        self._holds_rollout_weights = False
        self._again = partial(self._publish_rollout_again, trainer, module)
        perturbing = [callback for callback in rl_callbacks(trainer) if overrides(callback, "on_publish")]

        def attempt() -> PublishReport:
            compared = self.scores.due(self._published, self._rebuilt)
            # Each attempt starts the callbacks anew: what a repeated one draws is what the first drew.
            for callback in rl_callbacks(trainer):
                callback.on_rollout_start(trainer, module, self.version)
            altered: dict[str, Tensor] = {}

            def change(name: str, tensor: Tensor) -> Tensor:
                before = tensor
                for callback in perturbing:
                    tensor = callback.on_publish(trainer, module, name, tensor)
                if tensor is not before:
                    altered[name] = tensor if tensor.ndim == 1 else tensor.new_empty(0)
                return tensor

            report = self._publish_apart(module, change) if self._apart else self._publish_whole(module, change)
            if compared:
                self.scores.check(
                    trainer, module, self._source_of(trainer, module), not self._apart, altered, self.version
                )
            return report

        report = self._repeated(trainer, module, attempt)
        self.last_report, self._holds_rollout_weights, self._rebuilt = report, True, False
        self._published_at = trainer.global_step
        module.iteration.metrics.update(
            {
                "publish/version": float(report.version),
                "publish/bytes": float(report.bytes),
                "publish/gigabytes_per_second": report.bytes / 1e9 / max(report.seconds, 1e-9),
            }
        )
        if self._published == 0:
            self._write_layers(trainer, report)
        self._published += 1

    def _publish_rollout_again(self, trainer: Trainer, module: "GRPOModule") -> None:
        """Publish to a new engine; a sampler that was kept over updates cannot be had back and gets a new version."""
        self.version += self._published_at != trainer.global_step
        self._publish_rollout(trainer, module)

    def _publish_evaluation(self, trainer: Trainer, module: "GRPOModule") -> None:
        self._again = partial(self._publish_evaluation, trainer, module)
        one_format = self.evaluation_format == "rollout" or module.data.engine.single_format

        def attempt() -> PublishReport:
            source = self._source_of(trainer, module)
            # Base and adapter side by side are the packed learner's own arithmetic.
            if self._apart and (one_format or source.packed):
                return self._publish_apart(module, _unchanged)
            if one_format:
                return self._publish_whole(module, _unchanged)
            self._base = None
            dtype = module.data.engine.plain_dtype
            return self._deliver(module, source.plain(dtype), None, dict(source.shapes()))

        self._repeated(trainer, module, attempt)
        self._holds_rollout_weights = False

    def _repeated(self, trainer: Trainer, module: "GRPOModule", attempt: Callable[[], PublishReport]) -> PublishReport:
        """Publish, once more where `on_fault` says so, and to a new engine where this one dies of it."""
        engine, left = module.data.engine, 1 if self.on_fault == "retry" else 0
        while True:
            start = time.perf_counter()
            try:
                self._source_of(trainer, module)
                begin_rollout(trainer, engine)
                if not engine.holds_weights:
                    self._base = None
                report = attempt()
            except EngineDiedError as error:
                self._bury(trainer, module, error)
            except (PublishError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                self._base = None  # whatever arrived, the next publish sends everything
                faults = [fault.kind for fault in getattr(error, "faults", ())]
                event(trainer, "publish_fault", str(error), faults=faults)
                if not left:
                    raise
                left -= 1
            else:
                report.seconds = time.perf_counter() - start
                return report

    def _bury(self, trainer: Trainer, module: "GRPOModule", error: EngineDiedError) -> None:
        """Count a death, and forget everything about the engine that died."""
        self._base, self._source, self._holds_rollout_weights = None, None, False
        self._receipts.clear()
        self._rebuilt = True
        self._restarts.died(trainer, error)
        module.data.engine.close()

    def _hung(self, trainer: Trainer, module: "GRPOModule", sentence: str) -> None:
        """Leave a diary and a report behind; the engine ends the process after this."""
        event(trainer, "engine_hung", sentence)
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Report):
                callback.on_exception(trainer, module, EngineDiedError(sentence))

    def _source_of(self, trainer: Trainer, module: "GRPOModule") -> WeightSource:
        """Return the source of this run's weights; the first call sets the engine up."""
        if self._source is None:
            policy, engine = module.policy, module.data.engine
            self._source = WeightSource(
                policy, trainer.precision_plugin, self._rollout_format, self.exclude, self.quantize_head
            )
            self._source.check()
            engine.setup(policy, policy.tokenizer, module.data.sampling)
        return self._source

    def _publish_whole(self, module: "GRPOModule", change: Callable[[str, Tensor], Tensor]) -> PublishReport:
        source = self._source
        assert source is not None
        stream = source.whole(change, source.plain_dtype(module.data.engine))
        return self._deliver(module, stream, self._rollout_format, source.shapes())

    def _publish_apart(self, module: "GRPOModule", change: Callable[[str, Tensor], Tensor]) -> PublishReport:
        """Publish the base where the engine does not hold it, then what differs: norms and adapter."""
        source, engine = self._source, module.data.engine
        assert source is not None
        dtype, sent = source.plain_dtype(engine), 0
        state = source.base_state()
        if self._base is None or self._base[0] != state:
            self._base, self._perturbed = None, set()
            report = self._deliver(module, source.base(dtype), self._rollout_format, source.shapes())
            self._base, sent = (source.settle(engine), report.layers), report.bytes
        changed = source.changed_norms(change)
        restored = source.norms(self._perturbed - changed.keys())
        if changed or restored:
            norms = ((name, tensor.to(dtype)) for name, tensor in {**restored, **changed}.items())
            self._perturbed |= changed.keys()
            sent += self._deliver(module, norms, None, {}, engine.perturb).bytes
            self._perturbed = set(changed)
        report = self._deliver(module, source.adapter(engine.plain_dtype), None, {}, engine.load_adapter)
        report.layers = {**self._base[1], **report.layers}
        report.bytes += sent
        return report

    def _deliver(
        self,
        module: "GRPOModule",
        stream: Iterator[tuple[str, Tensor]],
        format: NumberFormat | None,
        shapes: dict[str, tuple[int, int]],
        load: Callable[[Iterator[tuple[str, Tensor]], int], PublishReport] | None = None,
    ) -> PublishReport:
        """Hand one stream to the engine, by `load_weights` or by `load`, and compare both ledgers."""
        engine = module.data.engine
        sampled = {name: shapes[name] for name in choose(list(shapes), max(self.version, 0))} if shapes else {}
        sent = SentLedger(self.version, format, sampled)
        watched = sent.watch(stream)
        if load is None:
            report = engine.load_weights(watched, format, self.version)
        else:
            report = load(watched, self.version)
        arrived = time.perf_counter()
        if report.received is not None:
            key = format if load is None else load.__name__
            faults = compare(sent, report.received, self._receipts.get(key))
            faults += compare_columns(sent, engine.read_columns, exact=format is None)
            if load is None:
                names = list(sent.receipts())
                faults += compare_read_back(sent, engine.read_back, names[:: max(len(names) // 4, 1)])
                self._receipts.clear()
            if faults:
                raise PublishError(faults, self.version)
            self._receipts[key] = sent.receipts()
        module.iteration.seconds["verify"] += time.perf_counter() - arrived
        return report

    @rank_zero_only
    def _write_layers(self, trainer: Trainer, report: PublishReport) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"version": report.version, "bytes": report.bytes, "layers": report.layers}
        (folder / "publish.json").write_text(json.dumps(content, indent=1))

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the published version and what the probe measured first."""
        return {"version": self.version, "probe": self.scores.baseline}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the numbering and the probe's bound."""
        self.version, self.scores.baseline = state_dict["version"], state_dict.get("probe")


def _unchanged(name: str, tensor: Tensor) -> Tensor:
    return tensor
