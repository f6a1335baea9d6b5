"""The data module: a task's prompts, the engine that answers them, and the sizes of everything."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lit_qrl.data.benchmark import Benchmark, Share, evaluation_sets, without_benchmarks
from lit_qrl.data.dataset import RolloutDataset
from lit_qrl.data.judging import Judging
from lit_qrl.data.problems import Problem, PromptOrder, admit
from lit_qrl.data.sizes import check_ranks, check_sizes, warn_of_fewer
from lit_qrl.data.task import Task
from lit_qrl.errors import ConfigError, StoppedError, require_object
from lit_qrl.loop.ahead import ahead_of, resumed_position
from lit_qrl.loop.budget import TokenBudget
from lit_qrl.loop.generation import scoring_progress
from lit_qrl.loop.hooks import Learner
from lit_qrl.loop.ranks import Slots
from lit_qrl.loop.schedule import check_ahead
from lit_qrl.loop.turns import TakesTurns
from lit_qrl.network.structure import check_positions, check_tokens
from lit_qrl.rewards.base import Sample, as_tensor, weigh_by_name
from lit_qrl.rollout.engine import Converses, InFlight, RolloutEngine
from lit_qrl.run.description import Described
from lit_qrl.run.stop import stop_run
from lit_qrl.types import Completion, SamplingParams

log = logging.getLogger(__name__)


class RolloutDataModule(Described, LightningDataModule):
    """Poses a task's problems to a rollout engine and yields scored micro-batches.

    One Lightning epoch is one iteration: `prompts_per_iteration` × `group_size` completions are drawn, then
    `passes` × `mini_batches` optimizer steps are taken on them.

    Args:
        task: the problems, their rewards, and what counts as correct.
        engine: draws the completions.
        prompts_per_iteration: distinct prompts per iteration, over all ranks.
        group_size: completions per prompt (G).
        passes: times the whole rollout is trained on.
        mini_batches: optimizer steps per pass.
        micro_batches: forward and backward passes per optimizer step; lowers memory, leaves the gradient unchanged.
            `auto` takes as many as each rollout's tokens need: at most `max_tokens_per_micro_batch`, or 8192, from the
            second iteration on as many as a GPU's free memory allows, up to 32768.
        max_prompt_tokens: longest prompt.
        max_completion_tokens: longest completion.
        long_prompt: `drop` removes longer prompts and says how many; `error` stops.
        temperature: of the rollout; log-probs are those of the distribution at this temperature.
        top_p: nucleus mass of the rollout.
        top_k: most likely tokens kept in the rollout; 0 keeps all.
        max_tokens_per_micro_batch: an upper bound on padded tokens; `setup` says which `micro_batches` meets it. With
            `auto` it is of the tokens that are computed.
        evaluation_limit: at most so many of the problems that the task holds out are evaluated on; 0 takes all.
        evaluation_samples: samples per problem for avg@k and pass@k; 0 decodes greedily alone.
        evaluation_temperature: of those samples; 0 decodes greedily alone.
        evaluation_top_p: nucleus mass of those samples.
        evaluation_greedy: also decode greedily for pass@1.
        evaluation_completion_tokens: longest completion of an evaluation; by default `max_completion_tokens`.
        evaluate_task: evaluate on the task's own held-out problems; else on `benchmarks` alone.
        benchmarks: further sets to evaluate on, each with its own task, decoding and lengths.
        schedule: `on_policy` draws and updates in turns; `one_step_off` draws the next rollout while the learner
            updates on this one, `async` the next `max_staleness`, by an engine in a process of its own.
        max_staleness: iterations by which the weights that drew may be older than the learner, with `async`.
        in_flight_updates: `async` publishes while completions are drawn, and their keys and values `keep`, `recompute`.
        replay: the folder of a run with `in_flight_updates`, where each update met the engine; here it meets it there.
        error_reward: the reward of a sample whose reward function failed or timed out; null leaves the sample out of
            its group's statistics and of the loss, as a reward that returns None does.
        reward_weights: factors of the task's rewards by name, instead of their own.
        seed: of prompts and sampling; by default the value of `seed_everything`.
        evaluation_size: the former name of `evaluation_limit`; a task's own is how many problems it holds out.
    """

    def __init__(
        self,
        task: Task,
        engine: RolloutEngine,
        prompts_per_iteration: int = 32,
        group_size: int = 8,
        passes: int = 1,
        mini_batches: int = 1,
        micro_batches: int | Literal["auto"] = 1,
        max_prompt_tokens: int = 256,
        max_completion_tokens: int = 256,
        long_prompt: Literal["drop", "error"] = "drop",
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_tokens_per_micro_batch: int | None = None,
        evaluation_limit: int = 0,
        evaluation_samples: int = 1,
        evaluation_temperature: float = 1.0,
        evaluation_top_p: float = 1.0,
        evaluation_greedy: bool = True,
        evaluation_completion_tokens: int | None = None,
        evaluate_task: bool = True,
        benchmarks: list[Benchmark] | None = None,
        schedule: Literal["on_policy", "one_step_off", "async"] = "on_policy",
        max_staleness: int = 1,
        in_flight_updates: InFlight = "none",
        replay: str | None = None,
        error_reward: float | None = 0.0,
        reward_weights: dict[str, float] | None = None,
        seed: int | None = None,
        evaluation_size: int | None = None,
    ) -> None:
        super().__init__()
        require_object("data.task", task, "Countdown()")
        require_object("data.engine", engine, "TransformersEngine()")
        self.task, self.engine = task, engine
        self.prompts_per_iteration, self.group_size = prompts_per_iteration, group_size
        self.passes, self.mini_batches, self.micro_batches = passes, mini_batches, micro_batches
        self.max_prompt_tokens, self.max_completion_tokens = max_prompt_tokens, max_completion_tokens
        self.temperature, self.top_p, self.top_k, self.long_prompt = temperature, top_p, top_k, long_prompt
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.budget = TokenBudget(max_tokens_per_micro_batch) if micro_batches == "auto" else None
        self.evaluation_limit = evaluation_limit if evaluation_size is None else evaluation_size
        self.evaluation_samples = evaluation_samples
        self.evaluation_temperature, self.evaluation_top_p = evaluation_temperature, evaluation_top_p
        self.evaluation_greedy, self.evaluation_completion_tokens = evaluation_greedy, evaluation_completion_tokens
        self.evaluate_task, self.benchmarks = evaluate_task, list(benchmarks or [])
        self.error_reward, self.reward_weights = error_reward, reward_weights or {}
        self.schedule: Literal["on_policy", "one_step_off", "async"] = schedule
        self.max_staleness, self.in_flight_updates = max_staleness, in_flight_updates
        self.ahead = ahead_of(schedule, max_staleness, in_flight_updates, replay)
        weigh_by_name(task.rewards, self.reward_weights)
        self.base_seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.position = 0
        self.unfinished: int | None = None
        self._problems: dict[str, list[Problem]] = {}
        self._order: PromptOrder | None = None
        check_sizes(self)
        own = {"samples": evaluation_samples, "temperature": evaluation_temperature, "top_p": evaluation_top_p}
        own |= {"greedy": evaluation_greedy, "completion_tokens": evaluation_completion_tokens or max_completion_tokens}
        self.evaluations = evaluation_sets(task if evaluate_task else None, self.evaluation_limit, own, self.benchmarks)

    # ------------------------------------------------------------------------------------------------ configuration

    @property
    def sampling(self) -> SamplingParams:
        """How rollouts are drawn."""
        return SamplingParams(
            max_tokens=self.max_completion_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.module.policy.stop_token_ids,
        )

    @property
    def module(self) -> Learner:
        """The module that trains on this data."""
        if self.trainer is None:
            raise RuntimeError("The data module is not attached to a Trainer yet.")
        return self.trainer.lightning_module  # pyright: ignore[reportReturnType]

    @property
    def updates(self) -> int:
        """Optimizer steps per iteration."""
        return self.passes * self.mini_batches

    @property
    def parts(self) -> int:
        """Micro-batches of each optimizer step, in this iteration where tokens say how many."""
        return self.micro_batches if isinstance(self.micro_batches, int) else self.budget.parts if self.budget else 1

    @property
    def slots(self) -> Slots:
        """Which groups of an iteration this rank draws and learns from."""
        ranks = {} if self.trainer is None else {"world_size": self.trainer.world_size}
        if self.trainer is not None and self.trainer.world_size > 1:
            ranks["rank"] = self.module.global_rank
        return Slots(groups=self.prompts_per_iteration, mini_batches=self.mini_batches, **ranks)

    @property
    def prompts_per_rank(self) -> int:
        """Prompts that this rank answers each iteration."""
        return self.prompts_per_iteration // (self.trainer.world_size if self.trainer else 1)

    @property
    def rows(self) -> int:
        """Sequences of a mini-batch that this rank learns from."""
        return self.prompts_per_rank // self.mini_batches * self.group_size

    def check_repeatable(self) -> None:
        """Raise `ConfigError` where completions depend on more than seeds and weights; a deterministic Trainer asks."""
        if isinstance(self.task, TakesTurns) and not self.engine.batch_invariant:
            raise ConfigError(
                "trainer.deterministic asks for the same bits in every run, and which turns are answered in one batch "
                "depends on how long the environment takes.",
                expected="a task of one turn, or data.engine.batch_invariant: true",
                given=type(self.task).__name__,
                remedy="Set data.engine.batch_invariant to true, or trainer.deterministic to false.",
            )
        self.engine.check_repeatable()

    def setup(self, stage: str) -> None:
        """Read the task's rows and check every size; runs before any weight is loaded."""
        check_ranks(self, self.trainer.world_size if self.trainer else 1)
        longest = self.max_prompt_tokens + self.max_completion_tokens
        rows, limit = self.rows, self.max_tokens_per_micro_batch
        sequences = 1 if self.budget is not None else rows // self.parts
        if limit is not None and sequences * longest > limit:
            fits = [k for k in range(1, rows + 1) if rows % k == 0 and rows // k * longest <= limit]
            alone = "One sequence alone exceeds the limit: raise it, or lower data.max_completion_tokens."
            raise ConfigError(
                "A micro-batch may exceed data.max_tokens_per_micro_batch.",
                expected=f"at most {limit} padded tokens",
                given=f"{sequences} sequence{'s' if sequences > 1 else ''} × {longest} tokens",
                remedy=f"Set data.micro_batches to {fits[0]}." if fits else alone,
            )
        policy, limits = self.module.policy, (self.max_prompt_tokens, self.long_prompt)
        for task in (self.task, *(one.task for one in self.evaluations)):
            talks = isinstance(self.engine, Converses) and not self.engine.draws_together
            if isinstance(task, TakesTurns) and not talks:
                asked = type(self.engine).__name__ + (" of several processes" if self.engine.draws_together else "")
                raise ConfigError(
                    f"{type(task).__name__} has several turns, which {asked} does not draw.",
                    expected="an engine with `converse`, such as TransformersEngine or VLLMEngine",
                    remedy="Set data.engine.",
                )
        if self.ahead is not None and stage == "fit":
            check_ahead(self.module, self.schedule)
        self.task.setup()
        for one in self.evaluations:
            one.task.setup()
            if not one.problems:
                rows = list(one.task.evaluation_rows())[: one.size or None]
                warn_of_fewer(f"{one.name}'s size" if one.name else "data.evaluation_limit", one.size, len(rows))
                what = f"{one.name} evaluation" if one.name else "evaluation"
                one.problems = admit(rows, one.task, policy, what, *((sys.maxsize, "error") if one.name else limits))
        drawn = [(len(p.prompt_ids), e.completion_tokens, e.name) for e in self.evaluations for p in e.problems]
        if stage == "fit":
            problems = admit(self.task.train_rows(), self.task, policy, "training", *limits)
            self._problems["train"] = without_benchmarks(problems, self.task, self.evaluations)
            self._order = None
            drawn += [(len(problem.prompt_ids), self.max_completion_tokens, "") for problem in self._problems["train"]]
        prompt, completion, name = max(drawn, key=lambda one: one[0] + one[1])
        remedy = "Lower data.max_completion_tokens, or data.max_prompt_tokens, which drops longer prompts."
        if name:
            remedy = f"Lower the completion_tokens of the benchmark {name}."
        check_positions(policy.config, prompt, completion, remedy)
        sets = [*self._problems.values(), *(one.problems for one in self.evaluations)]
        check_tokens(policy.config, [problem.prompt_ids for problems in sets for problem in problems])

    @property
    def longest_evaluation(self) -> int | None:
        """Tokens of the longest prompt and completion of an evaluation, where rollouts have none as long."""
        ends = (max((len(p.prompt_ids) for p in one.problems), default=0) for one in self.evaluations)
        longest = max(end + one.completion_tokens for end, one in zip(ends, self.evaluations, strict=True))
        return longest if longest > self.max_prompt_tokens + self.max_completion_tokens else None

    # ------------------------------------------------------------------------------------------------------ prompts

    def next_problems(self, count: int, numbers: Sequence[int] | None = None) -> list[Problem]:
        """Return this rank's share of the next prompts; every pass over the data has an order of its own.

        Args:
            count: how many all ranks draw now, the same on each: so the stream moves on by as much.
            numbers: of those the ones that this rank draws, from 0; by default all.
        """
        start, self.position = self.position, self.position + count
        return self.problems_at(start, range(count) if numbers is None else numbers)

    def problems_at(self, start: int, numbers: Sequence[int]) -> list[Problem]:
        """Return prompts of the stream.

        Args:
            start: a position in it.
            numbers: of those that are wanted, counted from there.
        """
        problems = self._problems["train"]
        if self._order is None:
            sources = [self.task.source(problem.row) for problem in problems]
            self._order = PromptOrder(sources, self.task.weights, self.base_seed, self.task.in_order)
        return [problems[self._order.index(start + i)] for i in numbers]

    def rollout_begins(self) -> None:
        """Keep the position of before: a rollout of which nothing was learned is drawn anew by whoever resumes."""
        self.unfinished = self.position

    def update_begins(self) -> None:
        """Forget it: from the first update on, the rollout is behind the weights."""
        self.unfinished = None
        if self.ahead is not None:
            self.ahead.over = self.module.trainer.current_epoch

    def samples(
        self, problems: Sequence[Problem], completions: Sequence[Completion], task: Task | None = None
    ) -> list[Sample]:
        """Return what the rewards see: texts and references, prompt-major; of a benchmark's task where one is given."""
        n = len(completions) // max(len(problems), 1)
        return [self._sample(problems[i // n], completion, task) for i, completion in enumerate(completions)]

    def _sample(self, problem: Problem, completion: Completion, task: Task | None = None) -> Sample:
        text, gold = self.module.policy.decode(completion.token_ids), (task or self.task).reference(problem.row)
        return Sample(problem.prompt_text, text, gold, dict(problem.row), completion.episode)

    def judging(self, problems: Sequence[Problem]) -> Judging | None:
        """Return what scores a rollout's completions as they come, or None where they are scored at the end.

        Args:
            problems: of the rollout, with `group_size` completions each.
        """
        early = self.task.begin() if self.engine.hands_out else None
        if early is None:
            return None
        return Judging(early, lambda number, one: self._sample(problems[number // self.group_size], one))

    def reward(
        self,
        problems: Sequence[Problem],
        completions: Sequence[Completion],
        task: Task | None = None,
        judging: Judging | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], float]:
        """Return total rewards, the parts by name, and how many samples' rewards failed; NaN is no score.

        Args:
            problems: of the completions.
            completions: prompt-major.
            task: of a benchmark; None is the run's.
            judging: that has begun with these completions.
        """
        begun = {} if judging is None else {"early": judging.of(completions)}
        try:
            total, parts, failed = (task or self.task).score(
                self.samples(problems, completions, task),
                self.error_reward,
                max(len(completions) // max(len(problems), 1), 1),
                lambda name: scoring_progress(self.trainer, name),
                **begun,
            )
        except StoppedError as error:  # a service that is away: the run goes on when it is back
            if self.trainer is None or not self.trainer.training:
                raise
            stop_run(self.trainer, "reward_failed", str(error), save=True, error=error)
        return as_tensor(total), {name: as_tensor(values) for name, values in parts.items()}, float(failed)

    def solved(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Return which completions of a rollout are correct, where one of its rewards judges evaluations too."""
        judge = self.task.judge
        if judge is None or not any(one.name == judge.name and type(one) is type(judge) for one in self.task.rewards):
            return None
        return parts[judge.name] >= 1.0

    # -------------------------------------------------------------------------------------------------------- loaders

    def train_dataloader(self) -> DataLoader:
        """Return the loader whose every pass is one iteration."""
        if self.budget is not None and self.trainer is not None:  # as its length says before anything is drawn
            self.trainer.accumulate_grad_batches = self.rows
        return DataLoader(RolloutDataset(self.module), batch_size=None, num_workers=0)

    def val_dataloader(self) -> DataLoader:
        """Return this rank's share of every set to evaluate on, one batch each."""
        rank, size = self.module.global_rank, self.module.trainer.world_size
        shares = [Share(one, index, rank, size) for index, one in enumerate(self.evaluations)]
        return DataLoader(shares, batch_size=None, num_workers=0)  # pyright: ignore[reportArgumentType]

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream of prompts, at the start of a rollout that is not finished."""
        chosen = {} if self.budget is None or self.budget.chosen is None else {"micro_batch_tokens": self.budget.chosen}
        if self.ahead is None:
            return {"position": self.position if self.unfinished is None else self.unfinished, **chosen}
        return {**self.ahead.state(self.position, self.module.trainer.world_size == 1), **chosen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position."""
        self.position = state_dict["position"]
        if self.budget is not None and self.max_tokens_per_micro_batch is None:
            self.budget.chosen = state_dict.get("micro_batch_tokens")
        if saved := state_dict.get("ahead"):
            self.position = resumed_position(
                self.ahead, saved, self.position, self.trainer is None or self.trainer.world_size == 1
            )

    def teardown(self, stage: str) -> None:
        """Free the engine and the rewards' workers."""
        self._close_engine()
        for task in {id(task): task for task in (self.task, *(one.task for one in self.evaluations))}.values():
            task.close()

    def on_exception(self, exception: BaseException) -> None:
        """Free the engine's memory and its folder, which Lightning's teardown does not reach then."""
        try:
            self._close_engine()
        except Exception as error:  # must not hide the one that ended the run
            log.warning("The engine could not be closed: %s: %s", type(error).__name__, error)

    def _close_engine(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.engine.close()
