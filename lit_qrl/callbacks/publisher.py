"""Publishes the learner's weights to the engine before each rollout, in the rollout format, and proves they arrived."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer

from lit_qrl import formats
from lit_qrl.callbacks.report import Report
from lit_qrl.formats.base import NumberFormat
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.publish.publisher import Publisher
from lit_qrl.publish.spec import PublishSettings
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.event_log import event

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
        settings = PublishSettings(
            format=None if format == "auto" else formats.get(format),
            every_n_iterations=every_n_iterations,
            evaluation_format=evaluation_format,
            exclude=tuple(exclude or ()),
            quantize_head=quantize_head,
            unaligned=unaligned,
            on_fault=on_fault,
            lora=lora,
            probe_every=probe_every,
            max_restarts=max_restarts,
        )
        self.publisher = Publisher(settings)

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Check the format against the precision plugin and the device, before any weight is loaded."""
        self.publisher.prepare(pl_module, partial(self._hung, trainer, pl_module))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Publish this iteration's sampler."""
        self.publisher.begin_iteration()

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Give the engine the current clean weights."""
        self.publisher.begin_evaluation()

    on_test_start = on_predict_start = on_validation_start

    def on_generation_end(self, trainer: Trainer, module: "GRPOModule") -> None:
        """Give the device back to the learner."""
        self.publisher.end_generation()

    def on_engine_died(self, trainer: Trainer, module: "GRPOModule", error: EngineDiedError) -> bool:
        """Build the engine again and publish what it held; stop the run when it keeps dying."""
        self.publisher.revive(error)
        return True

    def _hung(self, trainer: Trainer, module: "GRPOModule", sentence: str) -> None:
        """Leave a diary and a report behind; the engine ends the process after this."""
        event(trainer, "engine_hung", sentence)
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Report):
                callback.on_exception(trainer, module, EngineDiedError(sentence))

    def state_dict(self) -> dict[str, Any]:
        """Return the published version and what the probe measured first."""
        return {"version": self.publisher.version, "probe": self.publisher.baseline}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the numbering and the probe's bound."""
        self.publisher.version, self.publisher.baseline = state_dict["version"], state_dict.get("probe")
