import math
import random

import pytest
import torch

from lit_qrl.functional import diagnostics as F
from lit_qrl.functional.diagnostics import router_shift
from lit_qrl.functional.importance import log_ratio
from tests.default_dtype import bf16_default
from tests.functional.helpers import LENGTHS, listed, no_host_sync, on_ranks, rows


def test_histogram_equals_the_loop():
    learner, sampler, mask, advantages = rows(torch.float32)
    d = log_ratio(learner, sampler, mask)
    got = on_ranks(F.histogram2d_by_sign, d, sampler, mask, advantages, limit=0.5, bins=(10, 5))
    wanted = torch.zeros(2, 10, 5)
    for x, p, a in zip(listed(d, mask), listed(sampler, mask), advantages.tolist(), strict=True):
        for value, logprob in zip(x, p, strict=True):
            i = min(max(math.floor((value + 0.5) * 10), 0), 9)
            j = min(math.floor(math.exp(logprob) * 5), 4)
            if a:
                wanted[int(a > 0), i, j] += 1
    assert torch.equal(got, wanted)
    assert (got[:, 0] + got[:, -1]).sum() > 0


def test_mean_by_position_equals_the_loop():
    learner, sampler, mask, _ = rows(torch.float32, huge=0.0)
    d = log_ratio(learner, sampler, mask)
    mean, count = on_ranks(F.mean_by_position, d.abs(), mask, bins=3, length=8)
    wanted = {0: [], 1: [], 2: []}
    for row in listed(d, mask):
        for position, x in enumerate(row):
            wanted[position * 3 // 8].append(abs(x))
    assert count.tolist() == [len(wanted[i]) for i in range(3)]
    assert mean.tolist() == pytest.approx([sum(v) / len(v) if v else 0.0 for v in wanted.values()], rel=1e-5)


def test_accepted_by_length_equals_the_loop():
    _, _, mask, _ = rows()
    keep = torch.ones_like(mask)
    keep[0], keep[4], keep[5, 0] = False, False, False
    share, count = on_ranks(F.accepted_by_length, keep, mask, bins=3, length=6)
    wanted = {0: [], 1: [], 2: []}
    for i, n in enumerate(LENGTHS):
        if n:
            wanted[(n - 1) * 3 // 6].append(i not in (0, 4))
    assert count.tolist() == [len(v) for v in wanted.values()]
    assert share.tolist() == pytest.approx([sum(v) / len(v) for v in wanted.values()])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_repeated_ngrams_equal_the_loop(n):
    chooser = random.Random(n)
    lengths = [0, 1, 3, 4, 5, 12, 40, 40]
    tokens = torch.tensor([[chooser.choice([0, 1, 2, 150_000]) for _ in range(40)] for _ in lengths])
    tokens[-1] = 7
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    with no_host_sync():
        got = F.repeated_ngrams(tokens, mask, n)
    for i, length in enumerate(lengths):
        grams = [tuple(tokens[i, j : j + n].tolist()) for j in range(length - n + 1)]
        wanted = 1 - len(set(grams)) / len(grams) if grams else 0.0
        assert float(got[i]) == pytest.approx(wanted, rel=1e-5)


def test_repeated_ngrams_of_short_completions():
    tokens, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3).bool()
    assert torch.equal(F.repeated_ngrams(tokens, mask), torch.zeros(2))
    with pytest.raises(ValueError, match="n >= 1"):
        F.repeated_ngrams(tokens, mask, n=0)


def test_low_probability_share_equals_the_loop():
    learner, _, mask, advantages = rows()
    got = on_ranks(F.low_probability_share, learner, mask, advantages, threshold=0.3)
    flat = [
        math.exp(x) < 0.3
        for row, a in zip(listed(learner, mask), advantages.tolist(), strict=True)
        if a < 0
        for x in row
    ]
    assert float(got) == pytest.approx(sum(flat) / len(flat))
    assert 0 < float(got) < 1
    assert float(F.low_probability_share(learner, mask, advantages.abs(), 0.3)) == 0.0


def test_quadrant_shares_equal_the_loop_and_leave_out_advantages_of_zero():
    learner, sampler, mask, advantages = rows()
    advantages = torch.where(torch.arange(len(advantages)) == 0, 0.0, advantages)
    d = torch.where(mask, learner - sampler, 0.0)
    got = on_ranks(F.quadrant_shares, d, mask, advantages)
    sums = dict.fromkeys(F.QUADRANTS, 0.0)
    for row, m, a in zip(d, mask, advantages.tolist(), strict=True):
        for x in row[m].tolist():
            if a and x:
                sums[f"{'positive' if a > 0 else 'negative'}_{'above' if x > 0 else 'below'}"] += abs(x)
    total = float(d.abs().sum())
    assert got.tolist() == pytest.approx([sums[name] / total for name in F.QUADRANTS], rel=1e-5)
    assert float(got.sum()) < 1
    assert F.quadrant_shares(torch.zeros_like(d), mask, advantages).tolist() == [0, 0, 0, 0]


def test_ratio_quantiles_equal_those_of_the_sorted_values():
    generator = torch.Generator().manual_seed(0)
    d = 0.1 * torch.randn(20, 50, generator=generator)
    mask = torch.rand(20, 50, generator=generator) < 0.7
    parts = [F.ratio_counts(d[r::2], mask[r::2]) for r in (0, 1)]
    got = F.ratio_quantiles(parts[0] + parts[1], [0.01, 0.5, 0.99])
    values = sorted(math.exp(float(x)) for row, m in zip(d, mask, strict=True) for x in row[m])
    wanted = [values[math.ceil(level * len(values)) - 1] for level in (0.01, 0.5, 0.99)]
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=1e-3, atol=0)


def test_ratio_quantiles_of_equal_policies_are_exactly_one_and_extremes_stop_at_the_limit():
    ones = torch.ones(2, 3, dtype=torch.bool)
    assert F.ratio_quantiles(F.ratio_counts(torch.zeros(2, 3), ones), [0.01, 0.99]).tolist() == [1, 1]
    assert F.ratio_quantiles(torch.zeros(11), [0.5]).tolist() == [1]
    far = F.ratio_counts(torch.tensor([[30.0, -30.0, float("nan")]]), ones[:1])
    assert F.ratio_quantiles(far, [0.01, 0.99]).tolist() == pytest.approx([math.exp(-2), math.exp(2)])
    counts = F.ratio_counts(torch.tensor([[0.0, 0.1]]), ones[:1, :2])
    with bf16_default():  # on which nothing depends
        assert F.ratio_quantiles(counts, [0.99]).tolist() == pytest.approx([math.exp(0.1)], rel=1e-6)


def test_the_ratio_is_that_of_the_mean_move_over_layers_and_experts():
    generator = torch.Generator().manual_seed(0)
    now, before = (0.8 * torch.randn(2, 3, 4, 2, generator=generator) for _ in range(2))
    now.requires_grad_()
    got = router_shift(now, before, 0.4)
    assert not got.requires_grad
    floored = 0
    for b in range(2):
        for t in range(3):
            moved = [
                abs(float(now[b, t, layer, k].detach() - before[b, t, layer, k]))
                for layer in range(4)
                for k in range(2)
            ]
            expected = max(0.4, math.exp(-sum(moved) / 8))
            floored += expected == 0.4
            assert float(got[b, t]) == pytest.approx(expected, rel=1e-6)
    assert 0 < floored < 6


def test_the_mean_of_each_turn_is_that_of_the_loop():
    generator = random.Random(0)
    drawn = [[generator.random() < 0.6 for _ in range(17)] for _ in range(9)] + [[False] * 17, [True] * 17]
    values = torch.randn(len(drawn), 17, generator=torch.Generator().manual_seed(0))
    wanted = [[], [], []]
    for row, keep in enumerate(drawn):
        turn = -1
        for column, kept in enumerate(keep):
            turn += kept and (column == 0 or not keep[column - 1])
            if kept:
                wanted[min(turn, 2)].append(float(values[row, column]))
    mask = torch.tensor(drawn)
    means, counts = on_ranks(F.mean_by_turn, values, mask, turns=3)
    assert counts.tolist() == [len(one) for one in wanted]
    torch.testing.assert_close(means, torch.tensor([sum(one) / len(one) for one in wanted]), rtol=1e-5, atol=1e-6)
