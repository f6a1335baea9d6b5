"""How sequences become a padded batch, and how a mini-batch is cut into micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.errors import StoppedError
from lit_qrl.network.routing import unrouted
from lit_qrl.types import Completion, RolloutBatch


class LostRoutesError(StoppedError):
    """An engine did not say which experts a token took, and the learner must not choose others in silence."""


def assemble(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], group_size: int, pad_token_id: int
) -> RolloutBatch:
    """Return the padded batch of an iteration, prompts left-padded and completions right-padded; rewards are zero.

    Args:
        prompts: token ids, one per group.
        completions: `group_size` per prompt, prompt-major.
        group_size: completions per prompt.
        pad_token_id: fills both sides.

    Raises:
        LostRoutesError: when the engine recorded experts, and not those of every token.
    """
    b = len(completions)
    width = max(map(len, prompts))
    t = max(max(len(completion.token_ids) for completion in completions), 1)
    prompt_length = np.array([len(prompts[row // group_size]) for row in range(b)])
    length = np.array([len(completion.token_ids) for completion in completions])
    # Each array is filled at once, by NumPy: row by row takes as long as a decoding step, and so do operations of torch
    # between two rollouts, each of which wakes a thread of every core.
    columns, inside = np.arange(width + t), np.arange(t) < length[:, None]
    held = (columns >= width - prompt_length[:, None]) & (columns < width + length[:, None])
    words = chain.from_iterable((*prompts[row // group_size], *one.token_ids) for row, one in enumerate(completions))
    tokens = np.full((b, width + t), pad_token_id, dtype=np.int64)
    tokens[held] = np.fromiter(words, np.int64)
    logprobs = np.zeros((b, t), dtype=np.float32)
    logprobs[inside] = np.fromiter(chain.from_iterable(one.logprobs for one in completions), np.float32)
    mask = torch.from_numpy(inside)
    for row, completion in enumerate(completions):
        if completion.drawn is not None:
            mask[row, : len(completion.token_ids)] = torch.tensor(completion.drawn)
    return RolloutBatch(
        tokens=torch.from_numpy(tokens),
        prompt_length=torch.from_numpy(prompt_length),
        mask=mask,
        sampler_logprobs=torch.from_numpy(logprobs),
        rewards=torch.zeros(b),
        advantages=torch.zeros(b),
        group=torch.arange(b) // group_size,
        version=torch.tensor([completion.version for completion in completions]),
        stopped=torch.tensor([completion.finish_reason == "stop" for completion in completions]),
        routed_experts=_routes(completions, tokens.shape[1], t),
        kept=_kept(completions, t),
        versions=_versions(completions, t),
        **_denoising(completions, t),
    )


def _routes(completions: Sequence[Completion], s: int, t: int) -> Tensor | None:
    """Return the experts of a batch's tokens "b s layers k", or None where none were recorded."""
    recorded = [completion.routed_experts for completion in completions]
    given = [routes for routes in recorded if routes is not None]
    if not given:
        return None
    absent = unrouted(given[0].dtype)
    batch = given[0].new_full((len(recorded), s, *given[0].shape[1:]), absent)
    for row, (routes, completion) in enumerate(zip(recorded, completions, strict=True)):
        n = len(completion.token_ids)
        if routes is None and n == 0:  # a conversation that failed before the first answer
            continue
        if routes is None:
            raise LostRoutesError(_lost(row, "any token", "asked for"))
        # The last token is predicted, but nothing after it is computed, so no engine routes it.
        lost = (routes[:-1] == absent).flatten(1).any(dim=1).nonzero().flatten().tolist()
        if lost:
            raise LostRoutesError(_lost(row, f"token {lost[0]}", f"{len(lost)} of {len(routes) - 1} are missing"))
        batch[row, s - t + n - len(routes) : s - t + n] = routes
    return batch


def _kept(completions: Sequence[Completion], t: int) -> Tensor | None:
    """Return the ids among which a batch's tokens were drawn, "b t k" with −1 behind them; None where not recorded."""
    recorded = [completion.kept or [] for completion in completions]
    if all(completion.kept is None for completion in completions):
        return None
    most = max((len(ids) for row in recorded for ids in row), default=0)
    batch = torch.full((len(recorded), t, max(most, 1)), -1, dtype=torch.int32)
    for row, tokens in enumerate(recorded):
        for step, ids in enumerate(tokens):
            batch[row, step, : len(ids)] = ids
    return batch


def _versions(completions: Sequence[Completion], t: int) -> Tensor | None:
    """Return the versions of a batch's tokens "b t", or None where no sequence has two."""
    if all(completion.versions is None for completion in completions):
        return None
    batch = torch.tensor([completion.version for completion in completions])[:, None].repeat(1, t)
    for row, completion in enumerate(completions):
        if completion.versions is not None:
            batch[row, : len(completion.versions)] = torch.tensor(completion.versions)
    return batch


def _lost(row: int, token: str, how: str) -> str:
    return (
        f"The engine did not say which experts {token} of completion {row} took ({how}). Expected: those of every "
        "token of prompt and completion but the last, since the learner replays them. Remove RouterReplay, or set its "
        "level to old, which needs nothing of the engine."
    )


def _denoising(completions: Sequence[Completion], t: int) -> dict[str, Any]:
    """Return what a batch holds of masked diffusion; nothing of other completions."""
    seeds = [completion.mask_seed for completion in completions if completion.mask_seed is not None]
    if len(seeds) < len(completions):
        return {}
    steps = torch.full((len(completions), t), -1)
    for row, completion in enumerate(completions):
        known = completion.unmasked_at or []
        steps[row, : len(known)] = torch.tensor(known)
    over = [completion.drawn_over or len(completion.token_ids) for completion in completions]
    return {"mask_seed": torch.tensor(seeds), "drawn_over": torch.tensor(over), "unmasked_at": steps}


def concatenate(parts: list[RolloutBatch], pad_token_id: int, group_size: int, length: int = 0) -> RolloutBatch:
    """Return one batch from several, padded to a common width; groups are numbered anew.

    Args:
        parts: at least one.
        pad_token_id: fills both sides.
        group_size: completions per prompt.
        length: completion tokens that the batch is at least wide.
    """
    if len(parts) == 1 and parts[0].mask.shape[1] >= length:
        return parts[0]
    width = max(part.tokens.shape[1] - part.mask.shape[1] for part in parts)
    t = max(length, *(part.mask.shape[1] for part in parts))
    most = max((part.kept.shape[2] for part in parts if part.kept is not None), default=0)
    if any(part.versions is not None for part in parts):
        known = (part.version[:, None].repeat(1, t) if part.versions is None else part.versions for part in parts)
        parts = [replace(part, versions=versions) for part, versions in zip(parts, known, strict=True)]

    def widened(part: RolloutBatch, name: str, values: Tensor) -> Tensor:
        pads, fill = [0, t - values.shape[1]] if values.ndim > 1 else [], 0
        if name in ("tokens", "routed_experts", "router_logprobs"):  # as wide as prompt and completion
            pads = [width - part.tokens.shape[1] + part.mask.shape[1], t - part.mask.shape[1]]
        if name == "tokens":
            fill = pad_token_id
        elif name == "routed_experts":
            fill = unrouted(values.dtype)
        elif name == "kept":
            pads, fill = [0, most - values.shape[2], *pads], -1
        return F.pad(values, [0] * (2 * (values.ndim - 1) - len(pads)) + pads, value=fill)

    joined: dict[str, Any] = {"group": torch.arange(sum(map(len, parts))) // group_size}
    for one in fields(RolloutBatch):
        values = [getattr(part, one.name) for part in parts]
        if all(isinstance(value, Tensor) for value in values) and one.name not in joined:
            joined[one.name] = torch.cat([widened(part, one.name, v) for part, v in zip(parts, values, strict=True)])
    names = parts[0].reward_parts
    joined["reward_parts"] = {name: torch.cat([part.reward_parts[name] for part in parts]) for name in names}
    return RolloutBatch(**joined)


def deal_by_length(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return the row indices of `parts` micro-batches whose padded sizes (rows × longest row) are balanced.

    Rows are sorted by length and cut into runs, so that little is padded; the cuts minimise the largest padded size.

    Args:
        lengths: tokens of each row, at least `parts` of them.
        parts: number of micro-batches, each with at least one row.

    >>> deal_by_length([2, 9, 2, 3, 2, 2], 2)
    [[1], [3, 0, 2, 4, 5]]
    """
    if parts > len(lengths):
        raise ValueError(f"Cannot deal {len(lengths)} sequences into {parts} micro-batches; lower data.micro_batches.")
    longest = max(max(lengths), 1)
    return _balanced(lambda capacity: padded_parts(lengths, capacity), longest, longest * len(lengths), parts)


def deal_by_tokens(
    completions: Sequence[int], prompts: Sequence[int], groups: Sequence[int], parts: int
) -> list[list[int]]:
    """Return the row indices of `parts` micro-batches whose tokens are balanced, where rows of a group share a prompt.

    Args:
        completions: tokens of each row's completion, at least `parts` of them.
        prompts: tokens of each row's prompt.
        groups: whose rows stay together where they fit, so that their prompt is computed once.
        parts: number of micro-batches, each with at least one row.

    >>> deal_by_tokens([1, 1, 5, 5, 2, 2], [4, 4, 1, 1, 3, 3], [0, 0, 1, 1, 2, 2], 2)
    [[2, 3], [0, 1, 4, 5]]
    """
    low = max(max(p + c for p, c in zip(prompts, completions, strict=True)), 1)
    high = max(sum(prompts) + sum(completions), low)
    return _balanced(lambda capacity: token_parts(completions, prompts, groups, capacity), low, high, parts)


def token_parts(
    completions: Sequence[int], prompts: Sequence[int], groups: Sequence[int], capacity: int
) -> list[list[int]]:
    """Return rows in few micro-batches of at most `capacity` tokens, a group's prompt counted once in each.

    The largest groups come first, each into the first micro-batch that has room for it (first fit, decreasing); one
    that fits into none is cut. A longer row is alone.

    >>> token_parts([1, 1, 5, 5, 2, 2], [4, 4, 1, 1, 3, 3], [0, 0, 1, 1, 2, 2], 11)
    [[2, 3], [4, 5], [0, 1]]
    """
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    units: list[tuple[int, list[int]]] = []
    for members in rows.values():
        prompt = prompts[members[0]]
        size, unit = prompt, []
        for row in members:
            if unit and size + completions[row] > capacity:
                units.append((size, unit))
                size, unit = prompt, []
            size, unit = size + completions[row], [*unit, row]
        units.append((size, unit))
    bins: list[list[int]] = []
    taken: list[int] = []
    for size, unit in sorted(units, key=lambda one: -one[0]):
        place = next((index for index, used in enumerate(taken) if used + size <= capacity), len(bins))
        if place == len(bins):
            bins.append([])
            taken.append(0)
        bins[place] += unit
        taken[place] += size
    return [sorted(found) for found in bins]


def padded_parts(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows, longest first, in runs whose padded size is at most `capacity`; a longer row is alone.

    >>> padded_parts([2, 9, 2, 3, 2, 2], 9)
    [[1], [3, 0, 2], [4, 5]]
    """
    runs: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if runs[-1] and (len(runs[-1]) + 1) * max(lengths[runs[-1][0]], 1) > capacity:
            runs.append([])
        runs[-1].append(row)
    return runs


def _balanced(cut: Callable[[int], list[list[int]]], low: int, high: int, parts: int) -> list[list[int]]:
    """Return what `cut` makes at the smallest capacity that needs no more than `parts`, split into just as many."""
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    runs = cut(low)
    while len(runs) < parts:  # split the run with most rows: its size only shrinks
        widest = max(range(len(runs)), key=lambda index: len(runs[index]))
        run = runs.pop(widest)
        runs[widest:widest] = [run[: len(run) // 2], run[len(run) // 2 :]]
    return runs


def rows_of(groups: Sequence[int], group_size: int) -> Tensor:
    """Return the row numbers of whole groups, in the order given.

    >>> rows_of([2, 0], 2)
    tensor([4, 5, 0, 1])
    """
    return (torch.tensor(groups, dtype=torch.long)[:, None] * group_size + torch.arange(group_size)).flatten()
