"""How sequences become a padded batch, and how a mini-batch is cut into micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.types import Completion, RolloutBatch


def assemble(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], group_size: int, pad_token_id: int
) -> RolloutBatch:
    """Return the padded batch of an iteration, prompts left-padded and completions right-padded; rewards are zero.

    Args:
        prompts: token ids, one per group.
        completions: `group_size` per prompt, prompt-major.
        group_size: completions per prompt.
        pad_token_id: fills both sides.
    """
    b = len(completions)
    width = max(map(len, prompts))
    t = max(max(len(completion.token_ids) for completion in completions), 1)
    tokens = torch.full((b, width + t), pad_token_id, dtype=torch.long)
    mask = torch.zeros(b, t, dtype=torch.bool)
    logprobs = torch.zeros(b, t)
    for row, completion in enumerate(completions):
        prompt, n = prompts[row // group_size], len(completion.token_ids)
        tokens[row, width - len(prompt) : width + n] = torch.tensor([*prompt, *completion.token_ids])
        mask[row, :n] = True if completion.drawn is None else torch.tensor(completion.drawn)
        logprobs[row, :n] = torch.tensor(completion.logprobs)
    return RolloutBatch(
        tokens=tokens,
        prompt_length=torch.tensor([len(prompts[row // group_size]) for row in range(b)]),
        mask=mask,
        sampler_logprobs=logprobs,
        rewards=torch.zeros(b),
        advantages=torch.zeros(b),
        group=torch.arange(b) // group_size,
        version=torch.tensor([completion.version for completion in completions]),
        stopped=torch.tensor([completion.finish_reason == "stop" for completion in completions]),
        routed_experts=None,
    )


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

    def right(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, (0, t - tensor.shape[1]))

    tokens = [
        F.pad(
            part.tokens, (width - part.tokens.shape[1] + part.mask.shape[1], t - part.mask.shape[1]), value=pad_token_id
        )
        for part in parts
    ]
    names = parts[0].reward_parts
    b = sum(map(len, parts))
    return RolloutBatch(
        tokens=torch.cat(tokens),
        prompt_length=torch.cat([part.prompt_length for part in parts]),
        mask=torch.cat([right(part.mask) for part in parts]),
        sampler_logprobs=torch.cat([right(part.sampler_logprobs) for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        group=torch.arange(b) // group_size,
        version=torch.cat([part.version for part in parts]),
        stopped=torch.cat([part.stopped for part in parts]),
        reward_parts={name: torch.cat([part.reward_parts[name] for part in parts]) for name in names},
    )


def deal_by_length(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return the row indices of `parts` micro-batches whose padded sizes (rows × longest row) are balanced.

    Rows are sorted by length and cut into runs, so that little is padded; the cuts minimise the largest padded size.

    Args:
        lengths: tokens of each row, at least `parts` of them.
        parts: number of micro-batches, each with at least one row.

    Raises:
        ValueError: when there are fewer rows than parts.

    >>> deal_by_length([2, 9, 2, 3, 2, 2], 2)
    [[1], [3, 0, 2, 4, 5]]
    """
    if parts > len(lengths):
        raise ValueError(f"Cannot deal {len(lengths)} sequences into {parts} micro-batches; lower data.micro_batches.")
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    low, high = max(max(lengths), 1), max(max(lengths), 1) * len(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(order, lengths, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    runs = _runs(order, lengths, low)
    while len(runs) < parts:  # split the run with most rows: its padded size only shrinks
        widest = max(range(len(runs)), key=lambda index: len(runs[index]))
        run = runs.pop(widest)
        runs[widest:widest] = [run[: len(run) // 2], run[len(run) // 2 :]]
    return runs


def _runs(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for row in order:
        if runs[-1] and (len(runs[-1]) + 1) * max(lengths[runs[-1][0]], 1) > capacity:
            runs.append([])
        runs[-1].append(row)
    return runs


def rows_of(groups: Sequence[int], group_size: int) -> Tensor:
    """Return the row numbers of whole groups, in the order given.

    >>> rows_of([2, 0], 2)
    tensor([4, 5, 0, 1])
    """
    return (torch.tensor(groups, dtype=torch.long)[:, None] * group_size + torch.arange(group_size)).flatten()
