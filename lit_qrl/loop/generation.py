"""Drawing completions: from the engine of a run, again from a new one when it died, and what follows the last one."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeVar, cast, get_args

import torch
from lightning.pytorch import Trainer

from lit_qrl.loop.contracts import Learner, Problem
from lit_qrl.loop.hooks import rl_callbacks
from lit_qrl.loop.turns import Conversations, TakesTurns
from lit_qrl.rewards.streaming import StreamingRewards
from lit_qrl.rollout.engine import Converses, EngineDiedError, Progress
from lit_qrl.run.interrupt import Cut
from lit_qrl.types import Completion, EpisodeEnd, SamplingParams

log = logging.getLogger(__name__)

Made = TypeVar("Made")


def draw(
    learner: Learner,
    problems: Sequence[Problem],
    task: object,
    n: int,
    seed: int,
    stage: str,
    sampling: SamplingParams | None = None,
    positions: Sequence[int] | None = None,
    judging: StreamingRewards | None = None,
) -> list[Completion]:
    """Return `n` completions of each problem; when the engine dies and a callback revives it, the same once more.

    A task of several turns gives whole conversations as completions.

    Args:
        learner: whose data module owns the engine.
        problems: with their prompts.
        task: of the problems; one that takes turns plays them.
        n: completions per problem.
        seed: of this draw.
        stage: named on the progress bar.
        sampling: instead of the rollout's.
        positions: of the problems among those that several processes share; see `RolloutEngine.generate`.
        judging: takes completions as they are finished, of an engine that hands them out; `again` makes it forget them.

    Raises:
        EngineDiedError: when no callback built the engine again.
    """
    trainer, data, prompts = learner.trainer, learner.data, [problem.prompt_ids for problem in problems]
    options: dict[str, Any] = {} if positions is None else {"positions": positions}
    if judging is not None and judging.early:
        options["finished"] = judging

    def answered(progress: Progress | None) -> list[Completion]:
        if not isinstance(task, TakesTurns):
            return data.engine.generate(prompts, n, seed, progress, sampling, **options)
        assert isinstance(data.engine, Converses)
        chat = not isinstance(task.prompt(problems[0].row), str)
        numbers = range(len(problems)) if positions is None else positions
        talks = Conversations(
            task,
            [problem.row for problem in problems for _ in range(n)],
            [ids for ids in prompts for _ in range(n)],
            lambda messages: learner.policy.encode_turn(messages, chat),
            learner.policy.decode,
            (sampling or data.sampling).max_tokens,
            seed,
            progress,
            [number * n + i for number in numbers for i in range(n)],
        )
        with talks:
            data.engine.converse(talks, sampling)
        return talks.completions()

    while True:
        try:
            return answered(progress_of(trainer, stage, len(prompts) * n))
        except EngineDiedError as error:
            revived = [callback.on_engine_died(trainer, learner, error) for callback in rl_callbacks(trainer)]
            if not any(revived):
                raise
            if judging is not None:
                judging.again()


def together(learner: Learner, draw: Callable[[], Made]) -> Made:
    """Return what `draw` returns; all processes end after it where one has got a signal, which cuts it in each.

    Each calls this as often as the others.

    Args:
        learner: whose engine draws.
        draw: nothing in it is a collective but of an engine that draws together, which is not cut.

    Raises:
        InterruptedTogether: on all ranks.
    """
    trainer, made = learner.trainer, None
    ends: Any = next((one for one in trainer.callbacks if hasattr(one, "end_together")), None)  # pyright: ignore
    if ends is None or trainer.world_size == 1:
        return draw()
    with suppress(Cut), nullcontext() if learner.data.engine.draws_together else ends.cut():
        made = draw()
    ends.end_together(trainer, learner)
    return cast(Made, made)


def tell_episodes(learner: Learner, completions: Sequence[Completion]) -> None:
    """Log how the conversations of a rollout went; nothing where completions have one turn.

    Args:
        learner: whose iteration it is.
        completions: of a rollout.
    """
    episodes = [completion.episode for completion in completions if completion.episode is not None]
    if not episodes:
        return
    metrics, count = learner.iteration.metrics, len(episodes)
    metrics.values("environment/turns", torch.tensor([float(one.turns) for one in episodes]))
    said = sum(len(one.token_ids) - sum(one.drawn or ()) for one in completions)
    metrics.add("environment/tokens", torch.tensor([float(said), sum(len(one.token_ids) for one in completions)]))
    for end in get_args(EpisodeEnd):
        metrics.values(f"environment/ended_{end}", torch.tensor([float(one.ended == end) for one in episodes]))
    failed = [one for one in episodes if one.error]
    if failed:
        log.warning(
            "The environment failed in %d of %d conversations, which are left out; the first: %s",
            len(failed),
            count,
            failed[0].error,
        )


def drawn(learner: Learner) -> None:
    """Tell the callbacks that the engine has drawn all that it was needed for."""
    for callback in rl_callbacks(learner.trainer):
        callback.on_generation_end(learner.trainer, learner)


def progress_of(trainer: Trainer, stage: str, total: int) -> Progress | None:
    """Return what moves the progress bar during generation, or None where the bar cannot."""
    update: Callable[..., Any] | None = getattr(trainer.progress_bar_callback, "update_generation", None)
    return None if update is None else lambda done, tokens: update(stage, done, total, tokens)


def scoring_progress(trainer: Trainer | None, name: str) -> Callable[[int, int], None] | None:
    """Return what moves the progress bar while a reward judges, called with (done, total), or None where it cannot."""
    bar = getattr(trainer, "progress_bar_callback", None)
    update: Callable[..., Any] | None = getattr(bar, "update_scoring", None)
    return None if update is None else lambda done, total: update(name, done, total)
