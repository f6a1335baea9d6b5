"""Publishes the learner's weights to the engine before each rollout, in the rollout format, and proves they arrived."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_qrl.callbacks.base import RLCallback, overrides, rl_callbacks
from lit_qrl.errors import ConfigError
from lit_qrl.events import log_event
from lit_qrl.precision import formats
from lit_qrl.precision.export import export_tensors
from lit_qrl.precision.formats.base import NumberFormat
from lit_qrl.precision.surgery import quantizable_linears
from lit_qrl.rollout.receipt import (
    PublishError,
    SentLedger,
    TensorReceipt,
    choose,
    compare,
    compare_columns,
    compare_read_back,
)
from lit_qrl.types import PublishReport

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule


class WeightPublisher(RLCallback):
    """Keeps the sampler's weights what the run says they are.

    Before every n-th iteration it streams the learner's weights, layer by layer, through the callbacks' `on_publish`,
    the number format and the engine's loader, and raises the version. Before every evaluation it publishes the clean
    weights, which is not counted as a version.

    Args:
        format: number format of the sampler's linear layers; `auto` is what the precision plugin exports, else the
            learner's own dtype.
        every_n_iterations: iterations between publishes; more than 1 trains on a stale sampler.
        evaluation_format: `learner` evaluates in the learner's dtype, so that tables compare policies; `rollout` in
            the sampler's format.
        exclude: name patterns of linear layers that stay unquantized, beside embeddings, head and routers.
        unaligned: allow a format that differs from the precision plugin's own.
        on_fault: what follows when a publish did not arrive as sent: `stop` the run, or `retry` once and then stop.
    """

    def __init__(
        self,
        format: NumberFormat | str = "auto",
        every_n_iterations: int = 1,
        evaluation_format: Literal["learner", "rollout"] = "learner",
        exclude: list[str] | None = None,
        unaligned: bool = False,
        on_fault: Literal["stop", "retry"] = "stop",
    ) -> None:
        if every_n_iterations < 1:
            raise ConfigError("publisher.every_n_iterations is too small.", expected="at least 1")
        self.format = None if format == "auto" else formats.get(format)
        self.every_n_iterations, self.evaluation_format = every_n_iterations, evaluation_format
        self.exclude, self.unaligned = tuple(exclude or ()), unaligned
        self.on_fault = on_fault
        self.version = -1
        self._receipts: dict[NumberFormat | None, dict[str, TensorReceipt]] = {}
        self.last_report: PublishReport | None = None
        self._engine_ready = False
        self._holds_rollout_weights = False

    # ----------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Check the format against the precision plugin and the device, before any weight is loaded."""
        aligned: NumberFormat | None = getattr(trainer.precision_plugin, "format", None)
        if self.format is not None and aligned is not None and self.format != aligned and not self.unaligned:
            raise ConfigError(
                "The sampler's format differs from the one that the learner computes in.",
                expected=f"publisher.format: auto (the plugin's {aligned.name})",
                given=self.format.name,
                remedy="Set publisher.unaligned to true to study the mismatch.",
            )
        self._rollout_format = self.format if self.format is not None else aligned
        engine, sampling = pl_module.data.engine, pl_module.data.sampling
        engine.validate(self._rollout_format, sampling)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Publish this iteration's sampler."""
        due = trainer.current_epoch % self.every_n_iterations == 0
        if due or not self._holds_rollout_weights:
            with pl_module.timed("publish"):
                if due:
                    self.version += 1
                self._publish_rollout(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Give the engine the current clean weights."""
        self._publish_evaluation(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Give the engine the current clean weights."""
        self._publish_evaluation(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Give the engine the current clean weights."""
        self._publish_evaluation(trainer, pl_module)

    # ------------------------------------------------------------------------------------------------------ publishing

    def _publish_rollout(self, trainer: Trainer, module: "GRPOModule") -> None:
        for callback in rl_callbacks(trainer):
            callback.on_rollout_start(trainer, module, self.version)
        self._holds_rollout_weights = False
        perturbing = [callback for callback in rl_callbacks(trainer) if overrides(callback, "on_publish")]

        def perturbed(name: str, tensor: Tensor) -> Tensor:
            for callback in perturbing:
                tensor = callback.on_publish(trainer, module, name, tensor)
            return tensor

        def weights() -> Iterator[tuple[str, Tensor]]:
            return ((name, perturbed(name, tensor)) for name, tensor in module.policy.named_weights())

        report = self._send(trainer, module, weights, self._rollout_format)
        self.last_report, self._holds_rollout_weights = report, True
        module.iteration.update(
            {
                "publish/version": float(report.version),
                "publish/bytes": float(report.bytes),
                "publish/gigabytes_per_second": report.bytes / 1e9 / max(report.seconds, 1e-9),
            }
        )
        if self.version == 0 or trainer.is_last_batch:
            self._write_layers(trainer, report)

    def _publish_evaluation(self, trainer: Trainer, module: "GRPOModule") -> None:
        one_format = self.evaluation_format == "rollout" or module.data.engine.single_format
        self._send(trainer, module, module.policy.named_weights, self._rollout_format if one_format else None)
        self._holds_rollout_weights = False

    def _send(
        self,
        trainer: Trainer,
        module: "GRPOModule",
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
        format: NumberFormat | None,
    ) -> PublishReport:
        """Publish, compare both ledgers, and publish once more where `on_fault` says so."""
        engine, policy = module.data.engine, module.policy
        if not self._engine_ready:
            engine.setup(policy, policy.tokenizer, module.data.sampling)
            self._engine_ready = True
        attempts = 2 if self.on_fault == "retry" else 1
        for attempt in range(attempts):
            try:
                return self._attempt(module, weights(), format)
            except PublishError as error:
                log_event(
                    trainer.default_root_dir,
                    "publish_fault",
                    str(error),
                    iteration=trainer.current_epoch + 1,
                    faults=[fault.kind for fault in error.faults],
                )
                if attempt == attempts - 1:
                    raise
        raise AssertionError("unreachable")

    def _attempt(
        self, module: "GRPOModule", weights: Iterator[tuple[str, Tensor]], format: NumberFormat | None
    ) -> PublishReport:
        engine = module.data.engine
        start = time.perf_counter()
        linears = quantizable_linears(module.policy.network, self.exclude)
        shapes = {name.removesuffix(".base_layer"): tuple(linear.weight.shape) for name, linear in linears.items()}
        sampled = {name: shapes[name] for name in choose(list(shapes), max(self.version, 0))}
        sent = SentLedger(self.version, format, sampled)
        stream = sent.watch(export_tensors(weights, format, list(shapes)))
        report = engine.load_weights(stream, format, self.version)
        arrived = time.perf_counter()
        if report.received is not None:
            faults = compare(sent, report.received, self._receipts.get(format))
            faults += compare_columns(sent, engine.read_columns, exact=format is None)
            faults += compare_read_back(
                sent, engine.read_back, list(sent.receipts())[:: max(len(sent.receipts()) // 4, 1)]
            )
            if faults:
                raise PublishError(faults, self.version)
            self._receipts = {format: sent.receipts()}
        report.seconds = time.perf_counter() - start
        module.seconds["verify"] += time.perf_counter() - arrived
        return report

    @rank_zero_only
    def _write_layers(self, trainer: Trainer, report: PublishReport) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"version": report.version, "bytes": report.bytes, "layers": report.layers}
        (folder / "publish.json").write_text(json.dumps(content, indent=1))

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the published version."""
        return {"version": self.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the numbering."""
        self.version = state_dict["version"]
