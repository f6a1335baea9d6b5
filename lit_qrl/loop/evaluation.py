"""Answers to held-out problems: greedy and sampled, judged by the task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_qrl.loop.generation import draw, drawn
from lit_qrl.loop.hooks import Learner
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class Answers:
    """What one way of decoding made of the problems.

    Args:
        completions: `n` of each problem, prompt-major.
        correct: "problems n", True where a completion solves its problem.
    """

    completions: list[Completion]
    correct: Tensor


@torch.no_grad()
def answer(learner: Learner, problems: Sequence[Any], stage: str) -> Mapping[str, Answers]:
    """Return the answers `greedy` (one per problem, where `evaluation_greedy`) and `sampled` (`evaluation_samples`).

    The generator is seeded anew each time, so that evaluations differ by the policy alone and the training's random
    state is not touched.

    Args:
        learner: the policy, and the data module with task and engine.
        problems: of the data module.
        stage: named on the progress bar.
    """
    data, found = learner.data, {}
    ids = [problem.prompt_ids for problem in problems]
    plans = {"sampled": (data.evaluation_samples, data.evaluation_temperature)}
    if data.evaluation_greedy:
        plans = {"greedy": (1, 0.0), **plans}
    for name, (n, temperature) in plans.items():
        sampling = SamplingParams(
            max_tokens=data.max_completion_tokens,
            temperature=temperature,
            stop_token_ids=learner.policy.stop_token_ids,
        )
        seed = derive_seed(data.base_seed, "evaluation", learner.global_rank)
        completions = draw(learner, ids, n, seed, stage, sampling)
        correct = data.task.is_correct(data.samples(problems, completions))
        found[name] = Answers(completions, torch.tensor(correct).view(len(problems), n))
    drawn(learner)
    return found
