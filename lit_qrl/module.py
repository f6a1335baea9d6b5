"""GRPO as a LightningModule: score the rollout, correct the mismatch, and take clipped policy-gradient steps."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jsonargparse import lazy_instance
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError
from lit_qrl.functional.importance import batch_normalized, log_ratio
from lit_qrl.loop.batching import deal_by_length
from lit_qrl.loop.hooks import check_combination, combine, overrides, rl_callbacks, trainer_all_reduce
from lit_qrl.loop.metrics import AverageAtK, IterationMetrics, PassAtK
from lit_qrl.objective import GRPO, Objective
from lit_qrl.optim import build_optimizer, check_optimizer, schedule_factor
from lit_qrl.policy import CausalPolicy
from lit_qrl.run.identity import check_identity, identity
from lit_qrl.types import AllReduce, Correction, LossContext, MicroBatch, RolloutBatch


class GRPOModule(LightningModule):
    """Trains a policy on groups of completions; nothing in it knows about number formats.

    Each iteration (one Lightning epoch): the data module rolls out, `score_rollout` adds the learner's log-probs,
    `correct` asks every callback for weights and rejections, and `training_step` takes the objective's gradient.

    Args:
        policy: the model to train and its tokenizer.
        objective: the surrogate; its `old_logprobs`, `reduction` and advantage scale define the variant.
        optimizer: built from the trainable parameters, with their names, after the model is configured.
        lr_schedule: `constant`, `linear` or `cosine` decay to zero over the run, per optimizer step.
        warmup: share of the run's optimizer steps with linearly rising learning rate.
        lr_scheduler: any scheduler instead of the two above, stepped per optimizer step.
        evaluate_first: run the validation once before the first iteration.
        reference: the policy of the KL penalty: `auto` is the base under a LoRA, else a frozen copy.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        objective: Objective = lazy_instance(GRPO),  # pyright: ignore[reportArgumentType]
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_schedule: Literal["constant", "linear", "cosine"] = "constant",
        warmup: float = 0.0,
        lr_scheduler: LRSchedulerCallable | None = None,
        evaluate_first: bool = True,
    ) -> None:
        super().__init__()
        if not 0 <= warmup < 1:
            raise ConfigError("model.warmup is a share of the run.", expected="a number in [0, 1)", given=warmup)
        self.policy, self.objective, self.optimizer = policy, objective, optimizer
        self.lr_schedule: Literal["constant", "linear", "cosine"] = lr_schedule
        self.warmup, self.lr_scheduler = warmup, lr_scheduler
        self.evaluate_first = evaluate_first
        self.iteration = IterationMetrics()
        self.rollout: RolloutBatch | None = None
        self.last_logprobs: Tensor | None = None
        self.skip_step = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.accuracy = torch.nn.ModuleDict()
        self.last_row: dict[str, float] = {}

    # ---------------------------------------------------------------------------------------------------- the algorithm

    @torch.no_grad()
    def score_rollout(self, rollout: RolloutBatch, chunks: int, needed: bool) -> None:
        """Add the learner's and the reference's log-probs to a rollout, `chunks` forward passes each."""
        if needed:
            rollout.learner_old_logprobs = self.score(rollout, chunks)
        if self.objective.kl_coefficient > 0:
            with self.policy.reference():
                rollout.reference_logprobs = self.score(rollout, chunks)

    @torch.no_grad()
    def score(self, rollout: RolloutBatch, chunks: int = 1) -> Tensor:
        """Return the learner's log-probs "b t" of a rollout's completions, in the learner's own arithmetic."""
        scored = torch.zeros_like(rollout.sampler_logprobs)
        lengths = (rollout.prompt_length + rollout.completion_length).tolist()
        with self.trainer.precision_plugin.forward_context():
            for part in deal_by_length(lengths, min(chunks, len(rollout))):
                rows = torch.tensor(part, device=scored.device)
                piece = rollout.select(rows)
                scored[rows, : piece.mask.shape[1]] = self.policy(piece, self.temperature).logprobs.float()
        return scored.masked_fill_(~rollout.mask, 0.0)

    @torch.no_grad()
    def correct(self, mini_batch: RolloutBatch) -> Tensor:
        """Set the weights and the kept tokens of a whole mini-batch; return the denominator of its loss."""
        trainer = self.trainer
        self.skip_step = False
        corrections: list[Correction] = []
        if mini_batch.learner_old_logprobs is not None:
            context = LossContext(
                learner_old=mini_batch.learner_old_logprobs,
                sampler=mini_batch.sampler_logprobs,
                log_ratio=log_ratio(mini_batch.learner_old_logprobs, mini_batch.sampler_logprobs, mini_batch.mask),
                mask=mini_batch.mask,
                advantages=mini_batch.advantages,
                version=mini_batch.version,
                all_reduce=self.reduce,
            )
            for callback in rl_callbacks(trainer):
                correction = callback.correct(trainer, self, context)
                if correction is not None:
                    corrections.append(correction)
        mini_batch.weights, mini_batch.keep, metrics = combine(corrections, mini_batch.mask, all_reduce=self.reduce)
        level = self.objective.normalize_weights
        if level is not None and mini_batch.weights is not None:
            mini_batch.weights = batch_normalized(mini_batch.weights, mini_batch.mask, level, all_reduce=self.reduce)
        self.iteration.update(metrics)
        counted = mini_batch.mask if mini_batch.keep is None else mini_batch.mask & mini_batch.keep
        self.has_signal = self.reduce((counted.any(dim=1) & (mini_batch.advantages != 0)).sum()) > 0
        return self.reduce(self.objective.total(counted, self.data.max_completion_tokens))

    def training_step(self, micro_batch: MicroBatch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, so scaled that the optimizer sees the whole mini-batch's gradient."""
        batch = micro_batch.batch
        bonus = self.objective.entropy_coefficient != 0
        forward = self.policy(batch, self.temperature, entropy=True, entropy_gradient=bonus)
        self.last_logprobs = forward.logprobs.detach()
        terms = self.objective.terms(forward.logprobs, batch, forward.entropy)
        loss = self.objective.loss(terms.loss, batch, micro_batch.total)
        self._record(micro_batch, forward.logprobs, forward.entropy, terms.metrics, loss)
        # Lightning divides by the number of micro-batches and averages over ranks; the loss is a sum over both.
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    # ---------------------------------------------------------------------------------------------------- book-keeping

    def _record(
        self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor, metrics: dict[str, Tensor], loss: Tensor
    ) -> None:
        batch = micro_batch.batch
        for name, pair in metrics.items():
            self.iteration.add(name, pair)
        mask = batch.mask
        self.iteration.add("update/entropy", torch.stack([(entropy.detach() * mask).sum(), mask.sum().float()]))
        updates = len(self.trainer.train_dataloader.dataset) // self.data.micro_batches  # pyright: ignore
        self.iteration.add("update/loss", torch.stack([loss.detach(), loss.new_tensor(1 / self.data.micro_batches)]))
        rollout = self.rollout
        if rollout is not None and batch.learner_old_logprobs is None and updates == 1:
            if rollout.learner_old_logprobs is None:
                rollout.learner_old_logprobs = torch.zeros_like(rollout.sampler_logprobs)
            old = torch.where(mask, logprobs.detach().float(), 0.0)
            rollout.learner_old_logprobs[micro_batch.rows, : mask.shape[1]] = old

    @property
    def data(self) -> RolloutDataModule:
        """The data module of this run."""
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def temperature(self) -> float:
        """The rollout's temperature; all log-probs are of the distribution at it."""
        return self.data.temperature

    @property
    def corrected(self) -> bool:
        """True when some callback looks at learner_old before the update."""
        return any(overrides(callback, "correct") for callback in rl_callbacks(self.trainer))

    @property
    def reduce(self) -> AllReduce:
        """How a tensor is reduced over all ranks."""
        return trainer_all_reduce(self.trainer)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the enclosed work to `time/<phase>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    # ------------------------------------------------------------------------------------------------- Lightning hooks

    def setup(self, stage: str) -> None:
        """Check what can be known before any weight is loaded."""
        objective, data = self.objective, self.data
        check_combination(list(rl_callbacks(self.trainer)), objective)
        if stage == "fit":
            check_optimizer(self.optimizer, self.trainer.strategy.root_device, vectors=self.policy.lora is None)
            # An objective of the user's own may have a baseline of another kind.
            if data.group_size == 1 and type(objective).advantages is Objective.advantages:
                raise ConfigError(
                    "A group of one completion has no baseline: its advantage is always 0.",
                    expected="data.group_size of at least 2",
                    given=1,
                    remedy="Raise data.group_size.",
                )
            if data.sampling.truncated and (self.corrected or objective.carries_ratio):
                raise ConfigError(
                    "A correction needs the full sampling distribution, but the rollout is truncated: the sampler's "
                    "log-probs are renormalised over the kept tokens and the learner's are not.",
                    expected="data.top_p = 1 and data.top_k = 0",
                    given=f"top_p = {data.top_p}, top_k = {data.top_k}",
                    remedy="Lower data.temperature instead, or remove the correction.",
                )

    def configure_model(self) -> None:
        """Load the policy's weights; plugins that rename parameters act here, before a checkpoint is restored."""
        self.policy.configure()
        configure_policy = getattr(self.trainer.precision_plugin, "configure_policy", None)
        if configure_policy is not None:
            configure_policy(self.policy)
        if self.policy.packed_base is not None:
            self.policy.packed_base.require_packed(self.policy.network)
        if self.objective.kl_coefficient > 0:
            self.policy.keep_reference()
        if not self.accuracy:
            self.accuracy["greedy"] = PassAtK(1)
            self.accuracy["sampled"] = AverageAtK()
            if self.data.evaluation_samples > 1:
                self.accuracy["best"] = PassAtK(self.data.evaluation_samples)

    def configure_optimizers(self) -> Any:
        """Build the optimizer over the trainable parameters, and the learning-rate schedule."""
        trainable = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        if not trainable:
            raise ConfigError("The policy has no trainable parameter.", remedy="Check model.policy.lora.")
        optimizer = build_optimizer(self.optimizer, trainable)
        steps = int(self.trainer.estimated_stepping_batches)
        if self.lr_scheduler is not None:
            scheduler = self.lr_scheduler(optimizer)
        else:
            scheduler = LambdaLR(optimizer, lambda step: schedule_factor(step, steps, self.lr_schedule, self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say which model the weights are of."""
        checkpoint["policy"] = identity(self.policy)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of another model."""
        check_identity(checkpoint, self.policy)

    def on_train_start(self) -> None:
        """Evaluate the policy as it came, so that every curve has its starting point."""
        validates = self.trainer.limit_val_batches and self.trainer.check_val_every_n_epoch is not None
        if self.evaluate_first and validates and self.trainer.current_epoch == 0 and not self.trainer.fast_dev_run:  # pyright: ignore
            trainer = self.trainer
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def on_train_epoch_start(self) -> None:
        """Start the clock of the iteration."""
        self._started = time.perf_counter()

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        """Decide at the first micro-batch of an optimizer step whether it has anything to learn from."""
        if batch_idx % self.data.micro_batches == 0:
            self.skip_step = not bool(self.has_signal)

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        """Close the iteration after its last update: means, seconds, one row of metrics."""
        if not self.trainer.is_last_batch or self.rollout is None:
            return
        rollout, record = self.rollout, self.iteration
        tokens = float(rollout.mask.sum())
        record.update({"reward/mean": rollout.rewards.mean(), "reward/std": rollout.rewards.std()})
        record.update({f"reward/{name}": values.mean() for name, values in rollout.reward_parts.items()})
        record.update(
            {
                "rollout/length": rollout.completion_length.float().mean(),
                "rollout/stopped": rollout.stopped.float().mean(),
                "rollout/tokens_per_second": tokens / max(self.seconds["generate"], 1e-9),
            }
        )
        total = time.perf_counter() - self._started
        others = sum(self.seconds[name] for name in ("rollout", "score"))
        self.seconds["update"] = max(total - others, 0.0)
        self.seconds["iteration"] = total + self.seconds["publish"]
        record.update({f"time/{name}": seconds for name, seconds in self.seconds.items()})
        self.seconds.clear()
        self.last_row = record.compute(self.reduce)
        self.rollout = None

    def on_train_epoch_end(self) -> None:
        """Log the iteration's row; the epoch end that a resumed run repeats has none and logs nothing."""
        if self.last_row:
            # The values are of all ranks already, and the same on each: their mean leaves them as they are.
            self.log_dict(self.last_row, sync_dist=True)
        self.last_row = {}

    # -------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, rows: list, stage: str) -> None:
        start = time.perf_counter()
        answers = self.data.answer(rows, stage)
        names = {"greedy": "pass@1", "sampled": "accuracy", "best": f"pass@{self.data.evaluation_samples}"}
        for key, metric in self.accuracy.items():
            correct = answers.get("greedy" if key == "greedy" else "sampled")
            if correct is not None:
                metric.update(correct.to(self.device))  # pyright: ignore
                self.log(f"{stage}/{names[key]}", metric, on_epoch=True, batch_size=len(rows), prog_bar=True)  # pyright: ignore
        self.seconds["evaluate"] += time.perf_counter() - start

    def validation_step(self, batch: list, batch_idx: int) -> None:
        """Greedy pass@1, sampled avg@k and pass@k on the held-out rows."""
        self._evaluate(batch, "val")

    def test_step(self, batch: list, batch_idx: int) -> None:
        """Do the same under `test/`."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: list, batch_idx: int) -> list[dict[str, Any]]:
        """Return one record per sampled completion of the held-out rows."""
        self.data.answer(batch, "predict")
        problems, completions, correct = self.data.last_answers
        samples = self.data.samples(problems, completions)
        rewards, parts, _ = self.data.reward(problems, completions)
        return [
            {
                "prompt": sample.prompt,
                "completion": sample.completion,
                "reward": float(rewards[i]),
                "parts": {name: float(values[i]) for name, values in parts.items()},
                "correct": bool(correct[i]),
            }
            for i, sample in enumerate(samples)
        ]
