"""What is evaluated: the task's own held-out problems, and benchmarks beside them, each decoded in its own way."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_qrl.data.task import Task
from lit_qrl.errors import ConfigError
from lit_qrl.loop.contracts import Learner, Problem
from lit_qrl.loop.generation import draw, together
from lit_qrl.rewards.base import Sample
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion, SamplingParams

log = logging.getLogger(__name__)


@dataclass
class Benchmark:
    """A set of problems to evaluate on: the held-out rows of any task, and how they are answered.

    What is left out is as `data.evaluation_*` says. Its prompts are never dropped, however long.

    Args:
        task: the problems, and what counts as correct; training rows of the run with the same problem are removed.
        name: stands in its metrics, as in `val/<name>/pass@1`; by default the task's.
        size: problems used, the first; 0 uses all.
        samples: sampled answers to each problem (n); 0 decodes greedily alone.
        pass_at: k of each pass@k, estimated without bias from the n samples; by default n itself.
        temperature: of the samples; 0 decodes greedily alone.
        top_p: nucleus mass of the samples.
        greedy: also decode greedily.
        completion_tokens: longest answer.
    """

    task: Task
    name: str | None = None
    size: int = 0
    samples: int | None = None
    pass_at: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    greedy: bool | None = None
    completion_tokens: int | None = None


@dataclass(kw_only=True)
class EvaluationSet:
    """A benchmark, or the task's own held-out rows, with nothing left open.

    Args:
        name: of the benchmark; empty for the task's own.
        task: of the problems.
        samples: answers to each problem.
        pass_at: k of each pass@k.
        temperature: of the samples.
        top_p: of the samples.
        greedy: whether there is also a greedy answer.
        completion_tokens: longest answer.
        size: problems used; 0 uses all.
        problems: with their prompts.

    Raises:
        ConfigError: a number is out of range, or nothing would be drawn.
    """

    name: str
    task: Task
    samples: int
    pass_at: Sequence[int]
    temperature: float
    top_p: float
    greedy: bool
    completion_tokens: int
    size: int = 0
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        where, key = (f"data.benchmarks: {self.name}'s ", "") if self.name else ("data.evaluation_", "evaluation_")
        if self.temperature == 0 and self.samples >= 0:  # of any number of greedy answers each is the same
            self.samples, self.pass_at, self.greedy = 0, (), True
        ranges = (
            ("size", self.size >= 0, "0, which is all, or more"),
            ("temperature", self.temperature >= 0, "0, which is greedy, or more"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("completion_tokens", self.completion_tokens >= 1, "at least 1"),
            ("samples", self.samples >= (0 if self.greedy else 1), f"at least 1, or 0 and {key}greedy: true"),
            ("pass_at", all(1 <= k <= max(self.samples, 1) for k in self.pass_at), f"1 to {self.samples} samples"),
        )
        for name, good, expected in ranges:
            if not good:
                raise ConfigError(f"{where}{name} is out of range.", expected=expected, given=getattr(self, name))

    @property
    def accuracies(self) -> Mapping[str, tuple[str, int]]:
        """By the name of its metric: from which answers each accuracy is, and of how many one must be correct."""
        found = {"greedy_pass@1": ("greedy", 1)} if self.greedy else {}
        if self.samples:
            found["pass@1" if self.name else "accuracy"] = ("sampled", 1)
            found |= {f"pass@{k}": ("sampled", k) for k in self.pass_at if k > 1}
        return found

    def decodings(self, stop_token_ids: tuple[int, ...]) -> dict[str, tuple[int, SamplingParams]]:
        """Return how many answers of each kind are drawn of a problem, and how."""
        plain = {"max_tokens": self.completion_tokens, "stop_token_ids": stop_token_ids}
        found = {"greedy": (1, SamplingParams(temperature=0.0, **plain))} if self.greedy else {}
        if self.samples:
            drawn = SamplingParams(temperature=self.temperature, top_p=self.top_p, **plain)
            found["sampled"] = (self.samples, drawn)
        return found


class Share:
    """What one rank answers of a set; a plain class, so that no data loader takes it apart or copies it.

    Args:
        evaluated: the set.
        index: of the set in the evaluation.
        rank: of this process.
        world_size: processes that share the set.
    """

    def __init__(self, evaluated: EvaluationSet, index: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.index, self.name, self.task, self.decodings = index, evaluated.name, evaluated.task, evaluated.decodings
        self.problems = evaluated.problems[rank::world_size]
        self.positions = list(range(rank, len(evaluated.problems), world_size)) if world_size > 1 else None

    def __len__(self) -> int:
        return len(self.problems)

    def is_correct(self, completions: Sequence[Completion], decode: Callable[[Sequence[int]], str]) -> list[bool]:
        """Return for each completion, prompt-major, whether it solves its problem."""
        return self.task.is_correct(samples_of(self.problems, completions, self.task, decode))


@dataclass(frozen=True, slots=True)
class Answers:
    """What one way of decoding made of the problems.

    Args:
        completions: `n` of each problem, prompt-major.
        correct: "problems n", True where a completion solves its problem.
        stopped: "problems n", True where it ended by itself, not at the longest answer.
    """

    completions: list[Completion]
    correct: Tensor
    stopped: Tensor


@torch.no_grad()
def answer(learner: Learner, share: Share, stage: str) -> dict[str, Answers]:
    """Return the answers to a share of an evaluation: `greedy` (one per problem) and `sampled`, where it has them.

    The generator is seeded anew each time, so that evaluations differ by the policy alone and the training's random
    state is not touched; and by a problem's number in the whole set, so that any number of processes draws the same.

    Args:
        learner: the policy, and the data module with the engine.
        share: of a set of the data module.
        stage: named on the progress bar.
    """
    found, problems, policy = {}, share.problems, learner.policy
    seed = derive_seed(learner.data.base_seed, "evaluation", share.name or 0)
    for kind, (n, sampling) in share.decodings(policy.stop_token_ids).items():
        shown = f"{stage} {share.name} {kind}".replace("  ", " ")
        # More processes than problems leave some without any, which have a part of an engine all the same.
        asks = bool(problems) or learner.data.engine.draws_together
        drawing = partial(draw, learner, problems, share.task, n, seed, shown, sampling, share.positions)
        completions = together(learner, drawing if asks else list)  # `list` draws nothing
        correct = share.is_correct(completions, policy.decode) if problems else []
        stopped = [completion.finish_reason == "stop" for completion in completions]
        grids = (torch.tensor(one, dtype=torch.bool).view(len(problems), n) for one in (correct, stopped))
        found[kind] = Answers(completions, *grids)
    return found


def samples_of(
    problems: Sequence[Problem], completions: Sequence[Completion], task: Task, decode: Callable[[Sequence[int]], str]
) -> list[Sample]:
    """Return what rewards see of completions: texts and references, prompt-major.

    Args:
        problems: with as many completions each.
        completions: of them.
        task: of the problems.
        decode: from token ids to text.
    """
    n = len(completions) // max(len(problems), 1)
    return [sample_of(problems[i // n], one, task, decode) for i, one in enumerate(completions)]


def sample_of(problem: Problem, completion: Completion, task: Task, decode: Callable[[Sequence[int]], str]) -> Sample:
    """Return what rewards see of one completion."""
    text, gold = decode(completion.token_ids), task.reference(problem.row)
    return Sample(problem.prompt_text, text, gold, dict(problem.row), completion.episode)


def evaluation_sets(
    task: Task | None, size: int, own: Mapping[str, Any], benchmarks: Sequence[Benchmark]
) -> list[EvaluationSet]:
    """Return the sets to evaluate on, still without problems: the task's own first.

    Args:
        task: of the run; None where its held-out rows are not evaluated on.
        size: of its held-out rows those that are used; 0 uses all.
        own: how they are answered, and every benchmark that says nothing else.
        benchmarks: beside them.

    Raises:
        ConfigError: there is none, or two share a name.
    """
    at_all = [k for k in [own["samples"]] if k]
    found = [] if task is None else [EvaluationSet(name="", task=task, size=size, pass_at=at_all, **own)]
    names: set[str] = set()
    for one in benchmarks:
        name = one.name or one.task.name
        if name in names or not re.fullmatch(r"[\w+-][\w.+-]*", name):
            raise ConfigError(
                f"Two of data.benchmarks are named {name!r}."
                if name in names
                else f"{name!r} cannot name a benchmark.",
                expected="different names of letters, digits, - and _, since they stand in the metrics",
                given=repr(name),
                remedy="Give the benchmark another `name`.",
            )
        names.add(name)
        chosen = {key: value if getattr(one, key) is None else getattr(one, key) for key, value in own.items()}
        pass_at = [k for k in [chosen["samples"]] if k] if one.pass_at is None else one.pass_at
        found.append(EvaluationSet(name=name, task=one.task, size=one.size, pass_at=pass_at, **chosen))
    if not found:
        raise ConfigError(
            "There is nothing to evaluate on.",
            expected="data.evaluate_task: true, or a benchmark",
            given="data.evaluate_task: false and no data.benchmarks",
            remedy="Set one of the two; trainer.limit_val_batches: 0 leaves evaluations out.",
        )
    return found


def without_benchmarks(problems: list[Problem], task: Task, evaluations: Sequence[EvaluationSet]) -> list[Problem]:
    """Return the training problems that are none of a benchmark's.

    Args:
        problems: to train on.
        task: of the run.
        evaluations: of the run, with their problems.

    Raises:
        ConfigError: none is left.
    """
    evaluated = {one.task.key(problem.row) for one in evaluations if one.name for problem in one.problems}
    kept = [problem for problem in problems if not evaluated or task.key(problem.row) not in evaluated]
    if not kept:
        raise ConfigError(
            "Every training problem is one of data.benchmarks too.",
            expected="problems that are not evaluated on",
            given=f"{len(problems)} problems, all of them evaluated on",
            remedy="Train on another data set or split.",
        )
    if len(kept) < len(problems):
        log.info("Removed %d of %d training problems that a benchmark has.", len(problems) - len(kept), len(problems))
    return kept
