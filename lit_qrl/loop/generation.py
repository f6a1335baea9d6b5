"""Drawing completions: from the engine of a run, again from a new one when it died, and what follows the last one."""

from collections.abc import Callable, Sequence
from typing import Any

from lit_qrl.loop.hooks import Learner, rl_callbacks
from lit_qrl.rollout.engine import EngineDiedError, Progress
from lit_qrl.types import Completion, SamplingParams


def draw(
    learner: Learner,
    prompts: Sequence[Sequence[int]],
    n: int,
    seed: int,
    stage: str,
    sampling: SamplingParams | None = None,
    positions: Sequence[int] | None = None,
) -> list[Completion]:
    """Return `n` completions of each prompt; when the engine dies and a callback revives it, the same once more.

    Args:
        learner: whose data module owns the engine.
        prompts: token ids.
        n: completions per prompt.
        seed: of this draw.
        stage: named on the progress bar.
        sampling: instead of the rollout's.
        positions: of the prompts among those that several processes share; see `RolloutEngine.generate`.

    Raises:
        EngineDiedError: when no callback built the engine again.
    """
    trainer = learner.trainer
    shared = {} if positions is None else {"positions": positions}
    while True:
        progress = progress_of(trainer, stage, len(prompts) * n)
        try:
            return learner.data.engine.generate(prompts, n, seed, progress, sampling, **shared)
        except EngineDiedError as error:
            revived = [callback.on_engine_died(trainer, learner, error) for callback in rl_callbacks(trainer)]
            if not any(revived):
                raise


def drawn(learner: Learner) -> None:
    """Tell the callbacks that the engine has drawn all that it was needed for."""
    for callback in rl_callbacks(learner.trainer):
        callback.on_generation_end(learner.trainer, learner)


def progress_of(trainer: Any, stage: str, total: int) -> Progress | None:
    """Return what moves the progress bar during generation, or None where the bar cannot."""
    update: Callable[..., Any] | None = getattr(trainer.progress_bar_callback, "update_generation", None)
    return None if update is None else lambda done, tokens: update(stage, done, total, tokens)
