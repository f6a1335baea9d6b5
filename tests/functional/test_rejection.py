"""Rejections by the ratio, against peers' definitions as loops in Python."""

import math

import pytest
import torch

from lit_qrl.functional.rejection import ratio_keep
from tests.functional.helpers import DTYPES, listed, no_host_sync, rows, spread_out


def peers(option, threshold, row):
    """Return what verl's `rollout_rs` keeps of a row: one verdict per token (peers' names, thresholds and signs)."""
    level, _, name = option.rpartition("_")
    d = [max(-20.0, min(20.0, x)) for x in row]
    statistic = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[name]
    values = [statistic(x) for x in d]
    if level == "seq_sum":
        values = [sum(values)] * len(values)
    elif level == "seq_mean":
        values = [sum(values) / len(values)] * len(values)
    elif level == "seq_max":
        values = [max(values)] * len(values)
    if name != "k1":
        return [value <= threshold for value in values]
    low, high = map(float, threshold.split("_")) if isinstance(threshold, str) else (1 / threshold, threshold)
    return [math.log(low) <= value <= math.log(high) for value in values]


# The eleven options that verl has, each with bounds that both keep and reject some of the rows.
OPTIONS = {
    "token_k1": "0.8_1.2",
    "token_k2": 0.02,
    "token_k3": 0.02,
    "seq_sum_k1": "0.5_2.0",
    "seq_sum_k2": 0.12,
    "seq_sum_k3": 0.12,
    "seq_mean_k1": "0.85_1.1",
    "seq_mean_k2": 0.04,
    "seq_mean_k3": 0.04,
    "seq_max_k2": 0.1,
    "seq_max_k3": 0.1,
}


def ours(option, threshold):
    """Return the same in our words: bounds on learner over sampler, where a peer's are on the inverse."""
    level, _, divergence = option.rpartition("_")
    over = level.removeprefix("seq_")
    if divergence != "k1":
        return {"lower": None, "upper": threshold, "divergence": divergence, "over": over}
    low, high = map(float, threshold.split("_"))
    return {"lower": 1 / high, "upper": 1 / low, "divergence": divergence, "over": over}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_equals_the_definition_of_peers(option, dtype):
    learner, sampler, mask, _ = rows(dtype)
    d = torch.where(mask, learner - sampler, 0.0)
    with no_host_sync():
        keep = ratio_keep(d, mask, **ours(option, OPTIONS[option]))
    wanted = [[float(x) for x in peers(option, OPTIONS[option], row)] if row else [] for row in listed(d, mask)]
    assert torch.equal(keep, spread_out(wanted, mask).bool())
    verdicts = {x for row in wanted for x in row}
    assert verdicts == {0.0, 1.0}


@pytest.mark.parametrize("over", ["token", "mean", "sum", "max"])
def test_equal_policies_and_empty_sequences_are_kept(over):
    mask = torch.tensor([[True, True], [False, False]])
    for divergence, bounds in (("k1", (1.0, 1.0)), ("k2", (None, 1e-12)), ("k3", (None, 1e-12))):
        assert ratio_keep(torch.zeros(2, 2), mask, *bounds, divergence, over).all()


def test_a_ratio_beyond_all_measure_is_rejected():
    mask = torch.ones(1, 2, dtype=torch.bool)
    d = torch.tensor([[0.0, 200.0]])
    for divergence in ("k1", "k2", "k3"):
        assert ratio_keep(d, mask, None, 2.0, divergence, "token").tolist() == [[True, False]]
        assert not ratio_keep(d, mask, None, 2.0, divergence, "sum").any()
