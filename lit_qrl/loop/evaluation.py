"""Answers to held-out problems: greedy and sampled, judged by their task."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_qrl.loop.generation import draw, played_by, together
from lit_qrl.loop.hooks import Learner
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion


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
def answer(learner: Learner, share: Any, stage: str) -> Mapping[str, Answers]:
    """Return the answers to a share of an evaluation: `greedy` (one per problem) and `sampled`, where it has them.

    The generator is seeded anew each time, so that evaluations differ by the policy alone and the training's random
    state is not touched; and by a problem's number in the whole set, so that any number of processes draws the same.

    Args:
        learner: the policy, and the data module with the engine.
        share: a `Share` of a set of the data module.
        stage: named on the progress bar.
    """
    data, found = learner.data, {}
    evaluated, problems = share.set, share.problems
    ids = [problem.prompt_ids for problem in problems]
    seed = derive_seed(data.base_seed, "evaluation", evaluated.name or 0)
    for kind, (n, sampling) in evaluated.decodings(learner.policy.stop_token_ids).items():
        shown = f"{stage} {evaluated.name} {kind}".replace("  ", " ")
        # More processes than problems leave some without any, which have a part of an engine all the same.
        asks = bool(problems) or data.engine.draws_together
        played = played_by(evaluated.task, [problem.row for problem in problems])
        drawing = partial(draw, learner, ids, n, seed, shown, sampling, share.positions, played)
        completions = together(learner, drawing if asks else list)  # `list` draws nothing
        correct = evaluated.task.is_correct(data.samples(problems, completions, evaluated.task)) if problems else []
        stopped = [completion.finish_reason == "stop" for completion in completions]
        grids = (torch.tensor(one, dtype=torch.bool).view(len(problems), n) for one in (correct, stopped))
        found[kind] = Answers(completions, *grids)
    return found
