"""The data module: a task's prompts, the engine that answers them, and the sizes of everything."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_qrl.data.benchmark import Benchmark, Share, evaluation_sets, sample_of, without_benchmarks
from lit_qrl.data.problems import PromptOrder, admit, warn_of_fewer
from lit_qrl.data.task import Task
from lit_qrl.errors import ConfigError, StoppedError, require_object
from lit_qrl.loop.budget import TokenBudget
from lit_qrl.loop.contracts import Learner, MicroBatches, Problem, Slots
from lit_qrl.loop.generation import scoring_progress
from lit_qrl.loop.iteration import iterate
from lit_qrl.loop.schedule import check_ahead, schedule_of
from lit_qrl.loop.turns import TakesTurns
from lit_qrl.network.structure import check_positions, check_tokens
from lit_qrl.rewards.base import Sample, Scoring, as_tensor, weigh_by_name
from lit_qrl.rewards.streaming import StreamingRewards
from lit_qrl.rollout.engine import Converses, InFlight, RolloutEngine
from lit_qrl.run.description import Described
from lit_qrl.run.stop import stop_run
from lit_qrl.types import Completion, MicroBatch, SamplingParams

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
        max_tokens_per_micro_batch: most padded tokens of a micro-batch; `setup` names a `micro_batches` that meets it.
            With `auto` it counts the tokens that are computed.
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
        max_staleness: with `async`, iterations by which the sampler's weights may be older than the learner's.
        in_flight_updates: with `async`, publish while completions are generated: `keep` goes on with the old
            weights' keys and values, `recompute` computes them again; `none` does not publish then.
        replay: removed; only null, as saved configurations have it, is accepted.
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
        replay: None = None,
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
        by_tokens = not isinstance(micro_batches, int)
        self.budget = TokenBudget(max_tokens_per_micro_batch) if by_tokens else MicroBatches(micro_batches)
        self.evaluation_limit = evaluation_limit if evaluation_size is None else evaluation_size
        self.evaluation_samples = evaluation_samples
        self.evaluation_temperature, self.evaluation_top_p = evaluation_temperature, evaluation_top_p
        self.evaluation_greedy, self.evaluation_completion_tokens = evaluation_greedy, evaluation_completion_tokens
        self.evaluate_task, self.benchmarks = evaluate_task, list(benchmarks or [])
        self.error_reward, self.reward_weights = error_reward, reward_weights or {}
        self.max_staleness = max_staleness
        self.in_flight_updates: InFlight = in_flight_updates
        self.schedule, self._schedule = schedule_of(schedule, max_staleness, in_flight_updates), schedule
        weigh_by_name(task.rewards, self.reward_weights)
        self.base_seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.position = 0
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
        return self.budget.parts

    @property
    def slots(self) -> Slots:
        """Which groups of an iteration this rank draws and learns from."""
        groups, ranks = self.prompts_per_iteration, self._ranks
        rank = self.module.global_rank if ranks > 1 else 0
        return Slots(groups=groups, mini_batches=self.mini_batches, rank=rank, world_size=ranks)

    @property
    def prompts_per_rank(self) -> int:
        """Prompts that this rank answers each iteration."""
        return self.prompts_per_iteration // self._ranks

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

    def setup(self, stage: str) -> None:
        """Read the task's rows and check every size; runs before any weight is loaded."""
        check_ranks(self, self._ranks)
        longest = self.max_prompt_tokens + self.max_completion_tokens
        rows, limit = self.rows, self.max_tokens_per_micro_batch
        sequences = 1 if isinstance(self.budget, TokenBudget) else rows // self.parts
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
        if self._schedule != "on_policy" and stage == "fit":
            check_ahead(self.module, self._schedule)
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

    @property
    def evaluation_limits(self) -> tuple[int, ...]:
        """Longest answers of the sets to evaluate on, in tokens."""
        return tuple(one.completion_tokens for one in self.evaluations)

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

    def judging(self, problems: Sequence[Problem], streams: bool) -> StreamingRewards:
        """Return the rewards of a rollout, at work while it is drawn where the engine hands out what it has finished.

        Args:
            problems: of the rollout, with `group_size` completions each.
            streams: whether it is drawn now.
        """

        def sample(number: int, completion: Completion) -> Sample:
            return sample_of(problems[number // self.group_size], completion, self.task, self.module.policy.decode)

        early = streams and self.engine.hands_out
        return StreamingRewards(self.task.streaming if early else (), sample, early)

    def reward(
        self,
        samples: Sequence[Sample],
        group_size: int,
        task: Task | None = None,
        begun: Mapping[str, Scoring] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], float]:
        """Return total rewards, the parts by name, and how many samples' rewards failed; NaN is no score.

        Args:
            samples: prompt-major.
            group_size: samples of each prompt.
            task: of a benchmark; None is the run's.
            begun: rewards by name that have begun with these samples.
        """
        task = task or self.task
        try:
            total, parts, failed = task.score(
                samples,
                self.error_reward,
                group_size,
                lambda name: scoring_progress(self.trainer, name),
                **({"begun": begun} if begun else {}),
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
        most = self.budget.most(self.rows)
        self.module.trainer.accumulate_grad_batches = most  # as its length says before anything is drawn
        data = RolloutDataset(partial(iterate, self.module), self.updates * most)
        return DataLoader(data, batch_size=None, num_workers=0)

    def val_dataloader(self) -> DataLoader:
        """Return this rank's share of every set to evaluate on, one batch each."""
        rank, size = self.module.global_rank, self.module.trainer.world_size
        shares = [Share(one, index, rank, size) for index, one in enumerate(self.evaluations)]
        # As an iterable, which Lightning does not deal out among the ranks once more.
        return DataLoader(RolloutDataset(lambda: iter(shares), len(shares)), batch_size=None, num_workers=0)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream of prompts, at the start of a rollout that is not finished.

        Beside it lie rollouts that were drawn ahead, and the tokens of a micro-batch where their number is found.
        """
        return {**self.schedule.state(self.position, alone=self._ranks == 1), **self.budget.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved position."""
        self.position = self.schedule.load(state_dict, alone=self._ranks == 1)
        self.budget.load(state_dict)

    @property
    def _ranks(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size

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
        self.schedule.close()
        self.engine.close()


class RolloutDataset(IterableDataset):
    """Yields the micro-batches of one iteration each time it is iterated, or the shares of an evaluation.

    It has a length, because Lightning fetches one batch ahead from a loader without one and every update would be one
    step stale; and `iterate` is a generator, so that nothing runs before the weights of the iteration are published.

    Args:
        each: gives what a pass yields.
        length: of that at most.
    """

    def __init__(self, each: Callable[[], Iterator[MicroBatch] | Iterator[Share]], length: int) -> None:
        self._each, self._length = each, length

    def __len__(self) -> int:
        # Where tokens say how many micro-batches there are, `TokenBudget` tells Lightning once they are drawn.
        return self._length

    def __iter__(self) -> Iterator[MicroBatch] | Iterator[Share]:
        return self._each()


def check_sizes(data: RolloutDataModule) -> None:
    """Raise `ConfigError` for sizes of a `RolloutDataModule` that are out of range or do not divide each other."""
    by_tokens = data.micro_batches == "auto"
    if isinstance(data.micro_batches, str) and not by_tokens:
        raise ConfigError("data.micro_batches is no number.", expected="one, or auto", given=data.micro_batches)
    least = dict.fromkeys(("prompts_per_iteration", "group_size", "passes", "mini_batches"), 1)
    least |= {} if by_tokens else {"micro_batches": 1}
    least |= {"max_prompt_tokens": 1, "max_completion_tokens": 1, "top_k": 0, "evaluation_limit": 0}
    for name, lowest in least.items():
        if getattr(data, name) < lowest:
            raise ConfigError(f"data.{name} is too small.", expected=f"at least {lowest}", given=getattr(data, name))
    if data.temperature <= 0:
        raise ConfigError(
            "data.temperature must be positive: equal completions of a prompt have no signal.",
            expected="a number above 0",
            given=data.temperature,
            remedy="Leave it out, which is 1.0; data.evaluation_temperature: 0 evaluates greedily.",
        )
    if not 0 < data.top_p <= 1:
        raise ConfigError("data.top_p is out of range.", expected="a number in (0, 1]", given=data.top_p)
    if data.prompts_per_iteration % data.mini_batches:
        raise ConfigError(
            "data.prompts_per_iteration is not divisible by data.mini_batches.",
            expected=f"a multiple of {data.mini_batches}",
            given=data.prompts_per_iteration,
            remedy="Groups stay whole: change one of the two.",
        )
    rows = data.prompts_per_iteration // data.mini_batches * data.group_size
    if isinstance(data.micro_batches, int) and rows % data.micro_batches:
        raise ConfigError(
            "A mini-batch is not divisible by data.micro_batches.",
            expected=f"a divisor of its {rows} sequences",
            given=data.micro_batches,
            remedy="Change data.micro_batches.",
        )


def check_ranks(data: RolloutDataModule, ranks: int) -> None:
    """Raise `ConfigError` where the groups of a `RolloutDataModule` do not divide over the ranks.

    Args:
        data: the data module.
        ranks: processes of the learner.
    """
    unit = ranks * data.mini_batches
    if data.prompts_per_iteration % unit:
        raise ConfigError(
            "data.prompts_per_iteration does not divide over the ranks.",
            expected=f"a multiple of {ranks} ranks × {data.mini_batches} mini-batches",
            given=data.prompts_per_iteration,
            remedy=f"Set it to {-(-data.prompts_per_iteration // unit) * unit}, or trainer.devices to a divisor of "
            f"{data.prompts_per_iteration // data.mini_batches}, the groups of a mini-batch.",
        )
    rows = data.prompts_per_iteration // unit * data.group_size
    if isinstance(data.micro_batches, int) and rows < data.micro_batches:
        raise ConfigError(
            "A rank has fewer sequences of a mini-batch than data.micro_batches.",
            expected=f"at most {rows}, since {ranks} ranks share a mini-batch",
            given=data.micro_batches,
            remedy="Lower data.micro_batches: a micro-batch is a rank's, and grows smaller with more ranks.",
        )
