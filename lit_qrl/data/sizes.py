"""Sizes of a rollout that must fit each other: prompts, groups, mini-batches, micro-batches, ranks."""

import logging
from typing import Any

from lit_qrl.errors import ConfigError

log = logging.getLogger(__name__)


def check_sizes(data: Any) -> None:
    """Raise `ConfigError` for sizes of a `RolloutDataModule` that are out of range or do not divide each other."""
    by_tokens = data.micro_batches == "auto"
    if isinstance(data.micro_batches, str) and not by_tokens:
        raise ConfigError("data.micro_batches is no number.", expected="one, or auto", given=data.micro_batches)
    positive = ["prompts_per_iteration", "group_size", "passes", "mini_batches"]
    positive += [] if by_tokens else ["micro_batches"]
    for name in (*positive, "max_prompt_tokens", "max_completion_tokens"):
        if getattr(data, name) < 1:
            raise ConfigError(f"data.{name} is too small.", expected="at least 1", given=getattr(data, name))
    if data.temperature <= 0:
        raise ConfigError(
            "data.temperature must be positive: equal completions of a prompt have no signal.",
            expected="a number above 0",
            given=data.temperature,
            remedy="Leave it out, which is 1.0; data.evaluation_temperature: 0 evaluates greedily.",
        )
    if not 0 < data.top_p <= 1:
        raise ConfigError("data.top_p is out of range.", expected="a number in (0, 1]", given=data.top_p)
    for name in ("top_k", "evaluation_limit"):
        if getattr(data, name) < 0:
            raise ConfigError(
                f"data.{name} is too small.", expected="0 (all) or a positive number", given=getattr(data, name)
            )
    if data.prompts_per_iteration % data.mini_batches:
        raise ConfigError(
            "data.prompts_per_iteration is not divisible by data.mini_batches.",
            expected=f"a multiple of {data.mini_batches}",
            given=data.prompts_per_iteration,
            remedy="Groups stay whole: change one of the two.",
        )
    rows = data.prompts_per_iteration // data.mini_batches * data.group_size
    if not by_tokens and rows % data.micro_batches:
        raise ConfigError(
            "A mini-batch is not divisible by data.micro_batches.",
            expected=f"a divisor of its {rows} sequences",
            given=data.micro_batches,
            remedy="Change data.micro_batches.",
        )


def warn_of_fewer(key: str, wanted: int | None, there: int) -> None:
    """Say that there are fewer problems to evaluate on than a setting asks for.

    Args:
        key: of the setting.
        wanted: how many; None and 0 stand for all.
        there: how many there are.
    """
    if wanted and there < wanted:
        log.warning("%s asks for %d problems, and there are %d: these are evaluated on.", key, wanted, there)


def check_ranks(data: Any, ranks: int) -> None:
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
    if data.micro_batches != "auto" and rows < data.micro_batches:
        raise ConfigError(
            "A rank has fewer sequences of a mini-batch than data.micro_batches.",
            expected=f"at most {rows}, since {ranks} ranks share a mini-batch",
            given=data.micro_batches,
            remedy="Lower data.micro_batches: a micro-batch is a rank's, and grows smaller with more ranks.",
        )
