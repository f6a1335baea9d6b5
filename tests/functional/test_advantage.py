import math
import statistics

import pytest
import torch

from lit_qrl.functional.advantage import differing, group_advantages, overlong_penalty, whitened
from tests.functional.helpers import DTYPES, RTOL, Ranks, no_host_sync

REWARDS = [0.1, 0.1, 0.1, 1.0, 0.0, 2.5, -1.0, -1.0, 0.3]


def reference(rewards, g, scale, baseline="group", eps=1e-6):
    """One reward after the other; NaN is no reward."""
    out, given = [], [reward for reward in rewards if not math.isnan(reward)]
    for start in range(0, len(rewards), g):
        known = [reward for reward in rewards[start : start + g] if not math.isnan(reward)]
        for reward in rewards[start : start + g]:
            others = list(known)
            if math.isnan(reward) or (baseline != "none" and len(set(known)) == 1):
                out.append(0.0)
                continue
            others.remove(reward)
            centre = {"group": lambda k=known: statistics.fmean(k), "none": lambda: 0.0}.get(baseline)
            centre = centre() if centre else statistics.fmean(others)
            divisor = 1.0
            if scale == "group":
                divisor = (statistics.stdev(known) if len(known) > 1 else 0.0) + eps
            elif scale == "batch":
                divisor = statistics.stdev(given) + eps
            out.append((reward - centre) / divisor)
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equals_the_loop(scale, baseline, dtype):
    rewards = torch.tensor(REWARDS, dtype=dtype)
    with no_host_sync():
        got = group_advantages(rewards, 3, scale, baseline=baseline)
    wanted = reference(rewards.tolist(), 3, scale, baseline)
    torch.testing.assert_close(got.double(), wanted, rtol=RTOL[dtype], atol=1e-6 if baseline != "group" else 1e-7)
    assert got.dtype == dtype


def test_equal_rewards_give_exactly_zero_where_rounding_would_not():
    rewards = torch.full((7,), 0.1)
    assert (rewards - rewards.mean()).abs().max() > 0
    for scale in ("group", "batch", "none"):
        assert torch.equal(group_advantages(rewards, 7, scale), torch.zeros(7))
        assert group_advantages(rewards.bfloat16(), 7, scale).dtype == torch.float32


def test_without_a_baseline_rewards_are_themselves_and_groups_of_one_are_allowed():
    rewards = torch.tensor([1.0, 0.5])
    assert torch.equal(group_advantages(rewards, 1, "none", baseline="none"), rewards)
    with pytest.raises(ValueError, match="group of one"):
        group_advantages(rewards, 1, "group", baseline="none")


LENGTHS = [3, 1, 0, 5, 2, 7, 1, 4, 6]


def whitened_reference(values, lengths):
    """Mean and sample variance over a list that holds each advantage once for every token."""
    tokens = [a for a, n in zip(values, lengths, strict=True) for _ in range(n)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return torch.tensor([(a - mean) / math.sqrt(variance + 1e-8) for a in values], dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whitened_equals_the_loop_over_tokens(dtype):
    advantages, lengths = torch.tensor(REWARDS, dtype=dtype), torch.tensor(LENGTHS)
    with no_host_sync():
        got = whitened(advantages, lengths)
    wanted = whitened_reference(advantages.tolist(), LENGTHS)
    torch.testing.assert_close(got.double(), wanted, rtol=RTOL[dtype], atol=1e-6)


def test_whitened_is_global_over_ranks_and_zero_where_nothing_differs():
    advantages, lengths = torch.tensor([*REWARDS, 0.4], dtype=torch.float64), torch.tensor([*LENGTHS, 2])
    parts = Ranks(2).run(lambda r, f: whitened(advantages[5 * r : 5 * r + 5], lengths[5 * r : 5 * r + 5], all_reduce=f))
    wanted = whitened_reference(advantages.tolist(), lengths.tolist())
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-9, atol=1e-12)
    equal = torch.full((7,), 0.1)
    assert torch.equal(whitened(equal, torch.arange(7)), torch.zeros(7))


def test_batch_scale_is_global_over_ranks():
    rewards = torch.tensor([*REWARDS, 3.0, 1.0, 0.0], dtype=torch.float64)
    whole = group_advantages(rewards, 3, "batch")
    parts = Ranks(2).run(lambda r, f: group_advantages(rewards[6 * r : 6 * r + 6], 3, "batch", all_reduce=f))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(4), 1), "group of one"),
        ((torch.zeros(4), 2, "std"), "std"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    # The unknown scale is caught by the annotation where annotations are checked, by the function elsewhere.
    with pytest.raises(Exception, match=message):
        group_advantages(*arguments)


def test_overlong_penalty_equals_the_loop():
    lengths = torch.tensor([0, 5, 6, 7, 8, 9, 10])
    got = overlong_penalty(lengths, limit=10, cache=4, factor=0.5)
    wanted = []
    for length in lengths.tolist():
        if length <= 6:
            wanted.append(0.0)
        else:
            wanted.append(0.5 * ((10 - 4) - length) / 4)
    torch.testing.assert_close(got, torch.tensor(wanted))
    assert math.isclose(float(got[-1]), -0.5)


@pytest.mark.parametrize("cache", [0, 11])
def test_overlong_penalty_refuses_a_range_that_does_not_fit(cache):
    with pytest.raises(ValueError, match="cache"):
        overlong_penalty(torch.tensor([1]), limit=10, cache=cache)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_reward_that_was_not_given_is_in_no_statistic(scale, baseline):
    nan = math.nan
    rewards = [1.0, nan, 0.0, 4.0, nan, 2.0, nan, nan, nan, nan, 0.5, 0.5, nan, nan, nan, nan]
    given = torch.tensor(rewards, dtype=torch.float64)
    with no_host_sync():
        got = group_advantages(given, 4, scale, baseline=baseline)
    torch.testing.assert_close(got, reference(rewards, 4, scale, baseline), rtol=1e-9, atol=1e-9)


def test_groups_whose_given_rewards_differ_are_told():
    groups = torch.tensor([[0.0, math.nan, 1.0], [1.0, math.nan, 1.0], [math.nan] * 3, [math.nan, 2.0, 2.0]])
    assert differing(groups).tolist() == [True, False, False, False]
