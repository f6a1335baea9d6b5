"""Drawing completions: from the engine of a run, again from a new one when it died, and what follows the last one."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeVar, cast, get_args

import torch

from lit_qrl.loop.hooks import Learner, rl_callbacks
from lit_qrl.loop.turns import Conversations, TakesTurns
from lit_qrl.rollout.engine import EngineDiedError, Progress
from lit_qrl.run.interrupt import Cut, EndsTogether
from lit_qrl.types import Completion, EpisodeEnd, SamplingParams

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Played = tuple[Any, Sequence[Any]]
"""A task of several turns and the rows of the prompts."""


def draw(
    learner: Learner,
    prompts: Sequence[Sequence[int]],
    n: int,
    seed: int,
    stage: str,
    sampling: SamplingParams | None = None,
    positions: Sequence[int] | None = None,
    played: Played | None = None,
    judging: Any = None,
) -> list[Completion]:
    """Return `n` completions of each prompt; when the engine dies and a callback revives it, the same once more.

    A task of several turns gives whole conversations as completions.

    Args:
        learner: whose data module owns the engine.
        prompts: token ids.
        n: completions per prompt.
        seed: of this draw.
        stage: named on the progress bar.
        sampling: instead of the rollout's.
        positions: of the prompts among those that several processes share; see `RolloutEngine.generate`.
        played: the task, where its completions are conversations, and the row of each prompt.
        judging: takes completions as they are finished, of an engine that hands them out; `again` makes it forget them.

    Raises:
        EngineDiedError: when no callback built the engine again.
    """
    trainer = learner.trainer
    options: dict[str, Any] = {} if positions is None else {"positions": positions}
    if judging is not None and played is None:
        options["finished"] = judging
    while True:
        progress = progress_of(trainer, stage, len(prompts) * n)
        try:
            if played is not None:
                return _conversations(learner, prompts, n, seed, progress, sampling, positions, played)
            return learner.data.engine.generate(prompts, n, seed, progress, sampling, **options)
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
    ends = next((one for one in trainer.callbacks if isinstance(one, EndsTogether)), None)
    if ends is None or trainer.world_size == 1:
        return draw()
    with suppress(Cut), nullcontext() if learner.data.engine.draws_together else ends.cut():
        made = draw()
    ends.end_together(trainer, learner)
    return cast(Made, made)


def played_by(task: Any, rows: Sequence[Any]) -> Played | None:
    """Return a task and the rows of its prompts where their completions are conversations."""
    return (task, rows) if isinstance(task, TakesTurns) else None


def _conversations(
    learner: Learner,
    prompts: Sequence[Sequence[int]],
    n: int,
    seed: int,
    progress: Progress | None,
    sampling: SamplingParams | None,
    positions: Sequence[int] | None,
    played: Played,
) -> list[Completion]:
    task, rows = played
    policy, data = learner.policy, learner.data
    chat = not isinstance(task.prompt(rows[0]), str)
    numbers = range(len(prompts)) if positions is None else positions
    talks = Conversations(
        task,
        [row for row in rows for _ in range(n)],
        [prompt for prompt in prompts for _ in range(n)],
        lambda messages: policy.encode_turn(messages, chat),
        policy.decode,
        (sampling or data.sampling).max_tokens,
        seed,
        progress,
        [number * n + i for number in numbers for i in range(n)],
    )
    with talks:
        data.engine.converse(talks, sampling)
    return talks.completions()


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


def progress_of(trainer: Any, stage: str, total: int) -> Progress | None:
    """Return what moves the progress bar during generation, or None where the bar cannot."""
    update: Callable[..., Any] | None = getattr(trainer.progress_bar_callback, "update_generation", None)
    return None if update is None else lambda done, tokens: update(stage, done, total, tokens)


def scoring_progress(trainer: Any, name: str) -> Callable[[int, int], None] | None:
    """Return what moves the progress bar while a reward judges, called with (done, total), or None where it cannot."""
    bar = getattr(trainer, "progress_bar_callback", None)
    update: Callable[..., Any] | None = getattr(bar, "update_scoring", None)
    return None if update is None else lambda done, total: update(name, done, total)
