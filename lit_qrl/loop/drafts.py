"""Rollouts on their way from the engine to their iteration: what they are, and how checkpoints hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from lit_qrl.types import Completion


@dataclass
class Draft:
    """A rollout on its way.

    Args:
        iteration: that learns from it.
        weights: the iteration whose weights draw it.
        start: position of its first prompt.
        problems: of this process.
        completions: None until they are drawn.
        seconds: that the engine took.
    """

    iteration: int
    weights: int
    start: int
    problems: Sequence[Any]
    completions: list[Completion] | None = None
    seconds: float = 0.0


def versions_of(completion: Completion) -> list[int]:
    """Return the version of the weights that drew each token.

    >>> versions_of(Completion(token_ids=[5, 6], logprobs=[-1.0, -2.0], finish_reason="stop", version=3))
    [3, 3]
    """
    return completion.versions or [completion.version] * len(completion.token_ids)


def packed(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return completions as tensors, for a checkpoint.

    >>> one = Completion(token_ids=[3, 4], logprobs=[-0.1, -0.2], finish_reason="stop", version=7)
    >>> unpacked(packed([one])) == [one]
    True
    """
    routes, kept = [one.routed_experts for one in completions], [one.kept for one in completions]
    versions = torch.tensor([version for one in completions for version in versions_of(one)], dtype=torch.long)
    return {
        "lengths": torch.tensor([len(one.token_ids) for one in completions], dtype=torch.long),
        "tokens": torch.tensor([token for one in completions for token in one.token_ids], dtype=torch.long),
        "logprobs": torch.tensor([value for one in completions for value in one.logprobs], dtype=torch.float64),
        "stopped": torch.tensor([one.finish_reason == "stop" for one in completions]),
        "version": torch.tensor([one.version for one in completions], dtype=torch.long),
        **({"routes": routes} if any(one is not None for one in routes) else {}),
        **({"kept": kept} if any(one is not None for one in kept) else {}),
        **({"versions": versions} if any(one.versions is not None for one in completions) else {}),
    }


def unpacked(saved: Mapping[str, Any]) -> list[Completion]:
    """Return the completions of `packed`."""
    ends = list(accumulate(saved["lengths"].tolist()))
    begins = [0, *ends[:-1]]
    tokens, logprobs = saved["tokens"].tolist(), saved["logprobs"].tolist()
    stopped, version = saved["stopped"].tolist(), saved["version"].tolist()
    routes, kept = (saved.get(name, [None] * len(ends)) for name in ("routes", "kept"))
    versions = saved["versions"].tolist() if "versions" in saved else None
    return [
        Completion(
            token_ids=tokens[begins[i] : end],
            logprobs=logprobs[begins[i] : end],
            finish_reason="stop" if stopped[i] else "length",
            version=version[i],
            routed_experts=routes[i],
            kept=kept[i],
            versions=None if versions is None else versions[begins[i] : end],
        )
        for i, end in enumerate(ends)
    ]
