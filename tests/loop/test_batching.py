import itertools
import random

import pytest
import torch

from lit_qrl.loop.batching import LostRoutesError, assemble, concatenate, deal_by_length, rows_of
from lit_qrl.types import Completion
from tests.default_dtype import bf16_default
from tests.networks import batch_of


def padded(run, lengths):
    return len(run) * max(lengths[row] for row in run)


@pytest.mark.parametrize("seed", range(20))
def test_deal_keeps_every_row_once_and_minimises_the_largest_padded_size(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 30) for _ in range(draw.randint(4, 9))]
    parts = draw.randint(1, 4)
    runs = deal_by_length(lengths, parts)
    assert len(runs) == parts
    assert all(runs)
    assert sorted(itertools.chain(*runs)) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    best = min(
        max(padded(order[a:b], lengths) for a, b in itertools.pairwise((0, *cuts, len(order))))
        for cuts in itertools.combinations(range(1, len(order)), parts - 1)
    )
    assert max(padded(run, lengths) for run in runs) == best
    with pytest.raises(ValueError, match=r"lower data\.micro_batches"):
        deal_by_length(lengths, len(lengths) + 1)


def completion(ids, reason="stop", version=4):
    return Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason, version=version)


def test_assemble_pads_prompts_left_and_completions_right():
    completions = [completion([5, 6]), completion([7]), completion([8, 9, 9], "length"), completion([])]
    batch = assemble([[1, 2, 3], [4]], completions, group_size=2, pad_token_id=0)
    assert batch.tokens.tolist() == [
        [1, 2, 3, 5, 6, 0],
        [1, 2, 3, 7, 0, 0],
        [0, 0, 4, 8, 9, 9],
        [0, 0, 4, 0, 0, 0],
    ]
    assert batch.mask.sum(dim=1).tolist() == [2, 1, 3, 0]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.stopped.tolist() == [True, True, False, True]
    assert batch.version.tolist() == [4, 4, 4, 4]
    completions[0].logprobs = [-1.2345678, -0.5]
    with bf16_default():  # of a validation step
        batch = assemble([[1, 2, 3], [4]], completions, group_size=2, pad_token_id=0)
    assert batch.sampler_logprobs[0, 0].tolist() == torch.tensor(-1.2345678).tolist()


def test_the_ids_that_tokens_were_drawn_among_are_padded_behind():
    def drawn_among(ids, kept):
        one = completion(ids)
        one.kept = [torch.tensor(those, dtype=torch.int32) for those in kept]
        return one

    batch = assemble([[1], [4]], [drawn_among([5, 6], [[5], [6, 2]]), drawn_among([7], [[7, 8]])], 1, 0)
    assert batch.kept.tolist() == [[[5, -1], [6, 2]], [[7, 8], [-1, -1]]]
    assert batch.select(torch.tensor([1])).kept.tolist() == [[[7, 8]]]
    wide = assemble([[1, 2]], [drawn_among([5, 6, 7], [[5, 1, 2], [], [7]])], 1, 0)
    joined = concatenate([batch, wide], 0, 1)
    assert joined.kept.shape == (3, 3, 3)
    assert joined.kept[0].tolist() == [[5, -1, -1], [6, 2, -1], [-1, -1, -1]]
    assert joined.kept[2].tolist() == [[5, 1, 2], [-1, -1, -1], [7, -1, -1]]
    assert drawn_among([5, 6], [[5], [6]]).cut(1).kept[0].tolist() == [5]
    assert assemble([[1]], [completion([5])], 1, 0).kept is None


def test_select_trims_columns_that_are_padding_in_all_rows():
    batch = assemble([[1, 2, 3], [4]], [completion([5, 6, 6]), completion([7])], group_size=1, pad_token_id=0)
    short = batch.select(torch.tensor([1]))
    assert short.tokens.tolist() == [[4, 7]]
    assert short.mask.tolist() == [[True]]
    assert batch.select(torch.tensor([1]), trim=False).tokens.shape == (1, 6)


def test_rows_of_keeps_groups_whole():
    assert rows_of([1, 0], 3).tolist() == [3, 4, 5, 0, 1, 2]
    assert torch.zeros(8)[rows_of([], 4)].shape == (0,)  # a draw in which no group has variance


def part(prompts, completions, version):
    batch = batch_of(prompts, completions)
    b, t = batch.mask.shape
    batch.sampler_logprobs = -torch.arange(1.0, b * t + 1).view(b, t) * batch.mask
    batch.rewards = torch.arange(float(b)) + 10 * version
    batch.version = torch.full((b,), version)
    batch.reward_parts = {"digits": batch.rewards / 2}
    return batch


def read_rows(batch):
    """Every sequence as (prompt, completion, log-probs), read by its own lengths."""
    s, t = batch.tokens.shape[1], batch.mask.shape[1]
    for i in range(len(batch)):
        n, p = int(batch.mask[i].sum()), int(batch.prompt_length[i])
        yield (
            batch.tokens[i, s - t - p : s - t].tolist(),
            batch.tokens[i, s - t : s - t + n].tolist(),
            batch.sampler_logprobs[i, :n].tolist(),
        )


def test_batches_of_other_widths_are_joined_row_by_row():
    first = part([[5, 6, 7], [8]], [[9, 2], [3]], 1)
    second = part([[4], [4]], [[2, 3, 4, 5], [6]], 2)
    joined = concatenate([first, second], 0, 2)
    assert list(read_rows(joined)) == [*read_rows(first), *read_rows(second)]
    assert joined.tokens.shape == (4, 3 + 4)
    assert joined.rewards.tolist() == [10, 11, 20, 21]
    assert joined.reward_parts["digits"].tolist() == [5, 5.5, 10, 10.5]
    assert joined.version.tolist() == [1, 1, 2, 2]
    assert joined.group.tolist() == [0, 0, 1, 1]
    outside = joined.sampler_logprobs[~joined.mask]
    assert not outside.any()
    assert concatenate([first], 0, 2) is first


def test_tokens_of_two_versions_are_laid_out_like_tokens():
    def one(versions, tokens=(1, 2, 3)):
        n = len(tokens)
        return Completion(
            token_ids=list(tokens), logprobs=[-1.0] * n, finish_reason="stop", version=versions[0], versions=versions
        )

    batch = assemble([[5]], [one([4, 4, 5]), one([5, 5], tokens=(1, 2))], 2, 0)
    assert batch.versions.tolist() == [[4, 4, 5], [5, 5, 5]]
    assert batch.version.tolist() == [4, 5]
    assert assemble([[5]], [one([4, 4, 4])], 1, 0).versions is None
    alone = assemble([[5]], [one([6] * 4, tokens=(1, 2, 3, 4)), one([6])], 2, 0)
    joined = concatenate([batch, alone], 0, 2)
    assert joined.versions.tolist() == [[4, 4, 5, 0], [5, 5, 5, 0], [6] * 4, [6] * 4]
    assert joined.select(torch.tensor([1]), trim=True).versions.tolist() == [[5, 5]]


def routed(ids, *numbers):
    """A completion whose tokens, the prompt's first, took the experts of those numbers in one layer."""
    one = completion(ids)
    one.routed_experts = torch.tensor(numbers, dtype=torch.uint8)[:, None, None]
    return one


def test_routes_are_laid_out_like_tokens_and_stay_so():
    long, short = routed([5, 6], 11, 12, 13, 15, 255), routed([7], 24, 255)
    batch = assemble([[1, 2, 3], [4]], [long, short], group_size=1, pad_token_id=0)
    assert batch.routed_experts.flatten(1).tolist() == [[11, 12, 13, 15, 255], [255, 255, 24, 255, 255]]
    trimmed = batch.select(torch.tensor([1]))
    assert trimmed.routed_experts.flatten(1).tolist() == [[24, 255]]
    joined = concatenate([trimmed, batch], 0, 1)
    assert joined.routed_experts.flatten(1).tolist()[0] == [255, 255, 24, 255, 255]
    assert torch.equal(joined.routed_experts[1:], batch.routed_experts)
    assert joined.to("cpu").routed_experts.dtype == torch.uint8
    cut = long.cut(1)
    assert cut.routed_experts.flatten().tolist() == [11, 12, 13, 15]
    assert assemble([[1]], [completion([5])], group_size=1, pad_token_id=0).routed_experts is None
    failed = assemble([[4]], [routed([5], 1, 255), completion([])], group_size=2, pad_token_id=0)
    assert failed.routed_experts.flatten(1).tolist() == [[1, 255], [255, 255]]


@pytest.mark.parametrize(
    "lost, said",
    [
        (lambda: routed([6, 7], 1, 255, 255), r"token 1 of completion 1 took \(1 of 2 are missing\)"),
        (lambda: completion([6]), "any token of completion 1 took"),
    ],
)
def test_a_token_whose_experts_are_lost_is_named(lost, said):
    with pytest.raises(LostRoutesError, match=said):
        assemble([[4]], [routed([5], 1, 255), lost()], group_size=2, pad_token_id=0)
