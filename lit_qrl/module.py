"""GRPO as a LightningModule: Lightning's hooks around `loop.iteration`, and the gradient of the objective."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lit_qrl.data.benchmark import Share, answer, samples_of
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError, require_object
from lit_qrl.loop.batching import deal_by_length
from lit_qrl.loop.correction import check_combination, check_estimated, close, needs_kept, weigh_here
from lit_qrl.loop.evaluation import EvaluationMetrics
from lit_qrl.loop.generation import drawn
from lit_qrl.loop.hooks import (
    PreparesTrainer,
    check_limits,
    expect_metrics,
    follow_iterations,
    rl_callbacks,
    trainer_all_reduce,
)
from lit_qrl.loop.routing import balanced, record_difference, shifted
from lit_qrl.loop.state import IterationState, log_row
from lit_qrl.network.adapters import drop_loftq
from lit_qrl.network.balance import balance_coefficient
from lit_qrl.network.modes import evaluating
from lit_qrl.network.padding_free import laid_out
from lit_qrl.network.structure import outline_of
from lit_qrl.objective import GRPO, Objective
from lit_qrl.optim.build import check_optimizer, described_rate, with_settings
from lit_qrl.optim.masters import trained_by
from lit_qrl.optim.schedule import scheduled
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.precision.packed_base import check_plugin
from lit_qrl.run.checkpoint_files import (
    check_frozen,
    check_identity,
    describe_frozen,
    identity,
    put_together,
    read_checkpoint,
    read_data_alone,
)
from lit_qrl.run.console import phase
from lit_qrl.run.description import Described
from lit_qrl.run.event_log import number, tell
from lit_qrl.run.folder import CONFIG_FILE
from lit_qrl.run.interrupt import Interrupted, InterruptedTogether
from lit_qrl.run.stop import fits
from lit_qrl.run.torch_settings import make_deterministic
from lit_qrl.strategies.peers import Peers
from lit_qrl.strategies.sharded import ShardedStrategy
from lit_qrl.types import AllReduce, MicroBatch, RolloutBatch


class GRPOModule(Described, LightningModule):
    """Trains a policy on groups of completions; nothing in it knows about number formats.

    Each iteration (one Lightning epoch) rolls out, scores, corrects and deals micro-batches (`loop.iteration`);
    `training_step` takes the objective's gradient on each.

    Args:
        policy: the model to train and its tokenizer.
        objective: the surrogate; its `old_logprobs`, `reduction` and advantage scale define the variant.
        optimizer: built from the trainable parameters, with their names, after the model is configured. Adam and its
            variants default to an `lr` of 1e-6 (1e-5 for an adapter) and no weight decay; other optimizers of torch
            need an `lr`.
        lr_schedule: `constant`, or `linear` or `cosine` decay to zero over the run, per optimizer step. A decay ties
            each step's rate to the length of the run, so extending the run changes the rates.
        warmup: share of the run's optimizer steps with linearly rising learning rate.
        lr_scheduler: any scheduler instead of these two, stepped per optimizer step; none that waits on a plateau.
        evaluate_first: run the validation once before the first iteration.
        master_weights: keep fp32 masters of 16-bit weights, for 2 more bytes per parameter; false loses updates that
            are smaller than the weights' rounding.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        objective: Objective | None = None,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_schedule: Literal["constant", "linear", "cosine"] = "constant",
        warmup: float = 0.0,
        lr_scheduler: LRSchedulerCallable | None = None,
        evaluate_first: bool = True,
        master_weights: bool = True,
    ) -> None:
        super().__init__()
        if not 0 <= warmup < 1:
            raise ConfigError("model.warmup is a share of the run.", expected="a number in [0, 1)", given=warmup)
        if objective is None:  # the command line has built its default
            objective = GRPO()
        require_object("model.policy", policy, 'CausalPolicy("models/tiny-countdown")')
        require_object("model.objective", objective, "GRPO()")
        if isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                "model.optimizer has its parameters already; the policy's are known once it is loaded.",
                expected="a class or a function that makes one, such as partial(torch.optim.AdamW, lr=1e-6)",
                given=f"an object of {type(optimizer).__name__}",
            )
        self.policy, self.objective = policy, objective
        self.optimizer = with_settings(optimizer, adapted=policy.lora is not None)
        self.lr_schedule: Literal["constant", "linear", "cosine"] = lr_schedule
        self.warmup, self.lr_scheduler = warmup, lr_scheduler
        self.evaluate_first, self.master_weights = evaluate_first, master_weights
        self.iteration = IterationState()
        self.accuracy = torch.nn.ModuleList()
        self.first_step: int | None = None
        """Optimizer steps that were taken before this start of the run."""
        self._cut_short = False
        self._strict: dict[int, bool] = {}

    # ---------------------------------------------------------------------------------------------------- the algorithm

    @fits("scoring a rollout")
    @torch.no_grad()
    def score(self, rollout: RolloutBatch, chunks: int = 1, routes: Tensor | None = None) -> Tensor:
        """Return the learner's log-probs "b t" of a rollout's completions, in the learner's own arithmetic.

        Args:
            rollout: the sequences.
            chunks: forward passes.
            routes: "b s layers k", into which the experts that its own routers choose are written.
        """
        prompts = rollout.tokens.shape[1] - rollout.mask.shape[1]
        scored = torch.zeros_like(rollout.sampler_logprobs)
        lengths = rollout.total_length.tolist()
        with evaluating(self.policy), self.trainer.precision_plugin.forward_context():
            parts = deal_by_length(lengths, min(chunks, len(rollout)))
            chosen = [torch.tensor(part, device=scored.device) for part in parts]
            pieces = [laid_out(self.policy.network, rollout.select(rows)) for rows in chosen]
            for rows, piece in zip(chosen, pieces, strict=True):
                forward = self.policy(piece, self.temperature, routes=routes is not None)
                t = piece.mask.shape[1]
                scored[rows, :t] = forward.logprobs.float()
                columns = slice(prompts + t - piece.tokens.shape[1], prompts + t)
                if routes is not None:
                    routes[rows, columns] = forward.routes
                if rollout.router_logprobs is not None and rollout.learner_old_logprobs is None:
                    rollout.router_logprobs[rows, columns] = forward.gates
        return scored.masked_fill_(~rollout.mask, 0.0)

    @fits("computing a micro-batch's loss")
    def training_step(self, micro_batch: MicroBatch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, so scaled that the optimizer sees the whole mini-batch's gradient."""
        batch = micro_batch.batch
        bonus = self.objective.entropy_coefficient != 0
        replays = batch.routed_experts is not None
        with balanced(self) as balance:
            asked = {"entropy_gradient": bonus, "routes": replays, "divergence": self.objective.diverges}
            forward = self.policy(batch, self.temperature, entropy=True, **asked)
        self.iteration.logprobs = forward.logprobs.detach()
        if batch_idx < self.data.budget.parts:
            self.iteration.remember_old(micro_batch, forward.logprobs)
        weigh_here(self, micro_batch, forward.logprobs)
        given = shifted(self, batch, forward.gates)
        more = {} if forward.divergence is None else {"divergence": forward.divergence}
        terms = self.objective.terms(forward.logprobs, given, forward.entropy, **more)
        loss = self.objective.loss(terms.loss, batch, micro_batch.total) + balance(batch)
        self._record(micro_batch, forward.entropy, terms.metrics, loss)
        if batch.routed_experts is not None:
            record_difference(self.iteration.metrics, forward.routes, batch.routed_experts)
        # Lightning divides by the number of micro-batches and averages over ranks; the loss is a sum over both.
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    @fits("computing a micro-batch's gradient")
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """As Lightning's."""
        super().backward(loss, *args, **kwargs)

    @fits("stepping the optimizer")
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's."""
        super().optimizer_step(*args, **kwargs)

    # ---------------------------------------------------------------------------------------------------- book-keeping

    def _record(self, part: MicroBatch, entropy: Tensor, metrics: dict[str, Tensor], loss: Tensor) -> None:
        record, mask = self.iteration.metrics, part.batch.mask
        for name, pair in metrics.items():
            record.add(name, pair)
        record.add("update/entropy", torch.stack([(entropy.detach() * mask).sum(), mask.sum().float()]))
        parts = self.data.budget.parts * self.trainer.world_size  # of a mini-batch, whose loss is their sum
        if self.policy.recomputation is not None:
            record.value("update/recomputed_layers", float(self.policy.recomputation.again))
        record.add("update/loss", torch.stack([loss.detach(), loss.new_full((), 1 / parts)]))

    @property
    def data(self) -> RolloutDataModule:
        """The data module of this run."""
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def temperature(self) -> float:
        """The rollout's temperature; all log-probs are of the distribution at it."""
        return self.data.temperature

    @property
    def reduce(self) -> AllReduce:
        """How a tensor is reduced over all ranks."""
        return trainer_all_reduce(self.trainer)

    # ------------------------------------------------------------------------------------------------- Lightning hooks

    def setup(self, stage: str) -> None:
        """Check what can be known before any weight is loaded."""
        objective, data = self.objective, self.data
        check_combination(list(rl_callbacks(self.trainer)), objective)
        check_plugin(self.trainer.precision_plugin, self.policy, self.trainer.strategy.root_device)
        if objective.diverges and self.policy.denoises:
            raise ConfigError(
                "objective.kl_estimator: vocabulary needs autoregressive log-probs; masked diffusion has estimates.",
                expected="k1, k2, k3 or k3+",
                given="vocabulary",
            )
        if self.policy.denoises:
            check_estimated(list(rl_callbacks(self.trainer)), objective)
        follow_iterations(self.trainer)
        self.policy.batch_invariant = data.engine.batch_invariant
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.trainer.strategy.check(self)
        if stage == "fit":
            check_limits(self.trainer, data.passes * data.mini_batches)
            if objective.load_balance_coefficient != 0:
                balance_coefficient(outline_of(self.policy), objective.load_balance_coefficient)
            check_optimizer(self.optimizer, self.trainer.strategy.root_device, vectors=self.policy.lora is None)
            # An objective of the user's own may have a baseline of another kind.
            looks_at_groups = objective.baseline != "none" or objective.scale == "group"
            if data.group_size == 1 and looks_at_groups and type(objective).advantages is Objective.advantages:
                raise ConfigError(
                    "A group of one completion has no baseline: its advantage is always 0.",
                    expected="data.group_size of at least 2",
                    given=1,
                    remedy="Raise data.group_size, or set objective.baseline to none and its scale to whiten.",
                )
            if needs_kept(self) and not data.engine.records_kept:
                raise ConfigError(
                    "A correction needs the full sampling distribution, but the rollout is truncated: the sampler's "
                    f"log-probs are renormalised over the kept tokens, and {type(data.engine).__name__} does not say "
                    "which those are, so that the learner's could be.",
                    expected="data.top_p = 1 and data.top_k = 0, or an engine that does, as TransformersEngine",
                    given=f"top_p = {data.top_p}, top_k = {data.top_k}",
                    remedy="Lower data.temperature instead, or remove the correction.",
                )

    def configure_callbacks(self) -> list[Callback]:
        """Let the callbacks that ask for it prepare the Trainer, before its loggers and the data are set up.

        Several processes meet, and watch each other from then on. Checkpoints are read as data alone. A deterministic
        Trainer's switches are set before a device starts.
        """
        if make_deterministic():
            self.data.check_repeatable()
        read_data_alone(self.trainer.strategy)
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, PreparesTrainer):
                callback.prepare(self.trainer, self)
        return [Peers().meet(self.trainer)] if self.trainer.world_size > 1 else []

    @fits("loading the policy")
    @phase("Model loaded")
    def configure_model(self) -> None:
        """Load the policy's weights; plugins that rename parameters act here, before a checkpoint is restored."""
        self.policy.configure()
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, QuantizedPrecision):
            plugin.configure_policy(self.policy)
        if self.objective.kl_coefficient > 0:
            self.policy.keep_reference()
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy):
            strategy.shard(self.policy)
        if not self.accuracy:
            self.accuracy.extend(EvaluationMetrics(one.accuracies) for one in self.data.evaluations)

    @fits("building the optimizer")
    def configure_optimizers(self) -> Any:
        """Build the optimizer over the trainable parameters, and the learning-rate schedule."""
        trainable = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        if not trainable:
            raise ConfigError("The policy has no trainable parameter.", remedy="Check model.policy.lora.")
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        optimizer = trained_by(self.optimizer, trainable, self.master_weights, scaler)
        steps = int(self.trainer.estimated_stepping_batches)
        made = scheduled(optimizer, steps, self.lr_schedule, self.warmup, self.lr_scheduler)
        return {"optimizer": optimizer, "lr_scheduler": made}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say which model the weights are of, and leave out what `policy.source` gives again."""
        checkpoint["policy"] = identity(self.policy)
        frozen = self._frozen()
        if frozen:
            checkpoint["policy"]["frozen"] = describe_frozen(frozen)
            checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in frozen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the weights of another model, and an adapter over another base."""
        check_identity(checkpoint, self.policy)
        if not isinstance(self.trainer.strategy, ShardedStrategy):
            put_together(checkpoint, self.trainer.ckpt_path or "")
        self._put_frozen_back(checkpoint)

    def _put_frozen_back(self, checkpoint: dict[str, Any]) -> None:
        frozen = self._frozen()
        check_frozen(checkpoint, frozen)
        checkpoint["state_dict"] = {**frozen, **checkpoint["state_dict"]}

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike,
        map_location: Any = "cpu",
        hparams_file: str | os.PathLike | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> "GRPOModule":
        """Return the module of a run with the weights of one of its checkpoints, built as its `config.yaml` says.

        Args:
            checkpoint_path: a `.ckpt` in the run's `checkpoints/`.
            map_location: where the weights come to lie.
            hparams_file: the configuration; by default the run's.
            strict: no effect; what is missing is an error.
            weights_only: no effect; nothing else is read.
            **kwargs: arguments of the module instead of those in the configuration, such as `policy`.

        Raises:
            ConfigError: for a file without a configuration beside it, or of another model, and for a run over a packed
                base, whose weights a Trainer's precision plugin holds.
        """
        path = Path(checkpoint_path)
        module = cls.configured(Path(hparams_file or path.absolute().parent.parent / CONFIG_FILE), **kwargs)
        checkpoint = read_checkpoint(path, map_location)
        check_identity(checkpoint, module.policy)
        put_together(checkpoint, path, optimizers=False)
        module.policy.configure()
        missing = set(module.state_dict()) - set(checkpoint["state_dict"]) - set(module._frozen())
        if module.policy.packed_base is not None or missing:
            raise ConfigError(
                "The checkpoint does not hold the weights of its policy: a precision plugin packed them.",
                expected="a run of plain weights, or of an adapter over them",
                given=path,
                remedy="Run lit-qrl export RUN --output FOLDER --adapter on its run folder.",
            )
        module._put_frozen_back(checkpoint)
        module.load_state_dict(checkpoint["state_dict"], strict=False)  # accuracies of a run are no part of it
        return module.to(map_location) if map_location is not None else module

    @classmethod
    def configured(cls, config: Path, **changes: Any) -> "GRPOModule":
        """Return the module that a run's `config.yaml` describes; what no configuration can hold is left out.

        Args:
            config: the file.
            **changes: arguments instead of those in it.
        """
        try:
            described = yaml.safe_load(config.read_text(encoding="utf-8"))["model"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{config} is no configuration of a run.",
                expected="the config.yaml of a run folder, beside its checkpoints",
                given=f"{type(error).__name__}",
                remedy="Give a checkpoint in its run folder, or hparams_file.",
            ) from error
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls, "model", fail_untyped=False)
        known = {name: value for name, value in described.items() if not str(value).startswith("<")}
        parsed = parser.parse_object({"model": {**known, **changes}})
        drop_loftq(parsed.model.get("policy"))
        return parser.instantiate(parsed).model

    def _frozen(self) -> dict[str, Tensor]:
        """Return the weights that no run changes and that the policy's source holds, by their names here."""
        names = {f"policy.{name}" for name in self.policy.frozen_names()}
        return {name: tensor for name, tensor in self.state_dict().items() if name in names}

    def on_train_start(self) -> None:
        """Say how the run learns; evaluate the policy as it came, so that every curve has its starting point."""
        tell(self.trainer, "update", self._update_in_words())
        self._cut_short, self.first_step = False, self.trainer.global_step
        validates = self.trainer.limit_val_batches and self.trainer.check_val_every_n_epoch is not None
        if self.evaluate_first and validates and self.trainer.current_epoch == 0 and not self.trainer.fast_dev_run:  # pyright: ignore
            trainer = self.trainer
            trainer.validating = True
            with phase("First evaluation"):
                trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def _update_in_words(self) -> str:
        """Return how the run learns, as a sentence: what decides first whether it does."""
        trainer, updates = self.trainer, self.data.updates
        own = None if self.lr_scheduler is None else type(trainer.lr_scheduler_configs[0].scheduler).__name__
        rising = f" after warming up over {self.warmup:.0%} of the run" if self.warmup and own is None else ""
        rate = described_rate(trainer.optimizers[0], f"{own or self.lr_schedule}{rising}")
        clip, by = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        clipped = f"clipped to a {by.value if by else 'norm'} of {clip:g}" if clip else "not clipped"
        steps = f"{updates} optimizer step{'s' if updates > 1 else ''}"
        return f"Update: {rate}; gradients {clipped}; {steps} an iteration."

    def on_train_epoch_start(self) -> None:
        """Start the clock of the iteration."""
        self.iteration.start()

    def on_train_batch_start(self, batch: MicroBatch, batch_idx: int) -> None:
        """Decide at the first micro-batch of an optimizer step whether it has anything to learn from."""
        if batch_idx % self.data.budget.parts == 0:
            self.iteration.skip_step = not bool(batch.has_signal)
        self.iteration.update_begins()
        self.data.schedule.update_begins(self.trainer.current_epoch)
        self.data.budget.pass_begins(self, batch.batch, batch_idx)

    def on_after_backward(self) -> None:
        """Take what the pass needed of memory, where micro-batches follow from it."""
        self.data.budget.pass_ends(self)

    def on_train_batch_end(self, outputs: Any, batch: MicroBatch, batch_idx: int) -> None:
        """Close the iteration after its last update."""
        if self.trainer.is_last_batch:
            self.data.budget.end(self)
            close(self)

    def on_train_epoch_end(self) -> None:
        """Log the iteration's row; the epoch end that a resumed run repeats has none and logs nothing."""
        row = self.iteration.take_row()
        if row:
            log_row(self.trainer, row)
        expect_metrics(self.trainer, bool(row), self._strict)

    # -------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, share: Share, stage: str) -> None:
        if self._cut_short:
            return
        with self.iteration.timed("evaluate"):
            try:
                answers = answer(self, share, stage)
            except (Interrupted, InterruptedTogether):
                if not self.trainer.fit_loop.epoch_loop.batch_progress.current.ready:
                    raise
                self._cut_short = True
                return  # the updates before it are saved at the end of the iteration, which comes next
            accuracy: Any = self.accuracy[share.index]
            accuracy.add(
                {kind: found.correct.to(self.device) for kind, found in answers.items()},
                {kind: found.stopped.to(self.device) for kind, found in answers.items()},
            )
            place = f"{stage}/{share.name}".rstrip("/")
            for name, metric in accuracy.items():
                shown = name in accuracy.accuracies
                self.log(f"{place}/{name}", metric, on_epoch=True, batch_size=max(len(share), 1), prog_bar=shown)

    def validation_step(self, batch: Share, batch_idx: int) -> None:
        """Greedy pass@1, sampled avg@k and pass@k on a set of held-out problems, each with its interval."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Share, batch_idx: int) -> None:
        """Do the same under `test/`."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Share, batch_idx: int) -> list[dict[str, Any]]:
        """Return one record per sampled completion of a set of held-out problems; greedy ones where none is sampled."""
        found = answer(self, batch, "predict")
        answers, task = found.get("sampled") or found["greedy"], batch.task
        samples = samples_of(batch.problems, answers.completions, task, self.policy.decode)
        rewards, parts, _ = self.data.reward(samples, max(len(samples) // max(len(batch.problems), 1), 1), task)
        correct = answers.correct.flatten()
        return [
            {
                "benchmark": batch.name or task.name,
                "prompt": sample.prompt,
                "completion": sample.completion,
                "reward": number(rewards[i]),
                "parts": {name: number(values[i]) for name, values in parts.items()},
                "correct": bool(correct[i]),
            }
            for i, sample in enumerate(samples)
        ]

    def on_validation_epoch_end(self) -> None:
        """Give the device back to the learner: all that was asked for is drawn."""
        if not self._cut_short:
            drawn(self)

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end
