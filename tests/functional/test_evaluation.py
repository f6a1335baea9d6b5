import math
from itertools import combinations

import pytest
import torch

from lit_qrl.functional.evaluation import effective_size, pass_at_k, wilson_interval


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    correct = torch.rand(20, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    for k in (1, 2, 4, 6):
        expected = []
        for row in correct.tolist():
            subsets = list(combinations(row, k))
            expected.append(sum(any(subset) for subset in subsets) / len(subsets))
        assert pass_at_k(correct, k).tolist() == pytest.approx(expected)


def wilson_by_hand(p, n, z=1.959964):
    """The two roots of |p − π| = z √(π (1 − π) / n)."""
    a, b, c = 1 + z * z / n, -(2 * p + z * z / n), p * p
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


@pytest.mark.parametrize(("solved", "problems"), [(0, 15), (1, 15), (7, 15), (15, 15), (250, 500)])
def test_with_one_draw_the_interval_is_wilsons(solved, problems):
    values = torch.tensor([1.0] * solved + [0.0] * (problems - solved), dtype=torch.float64)
    size = effective_size(values.sum(), (values**2).sum(), torch.tensor(problems), 1)
    assert float(size) == pytest.approx(problems)
    found = [float(end) for end in wilson_interval(values.mean(), size)]
    assert found == pytest.approx(wilson_by_hand(solved / problems, problems), abs=1e-9)


def test_draws_that_repeat_a_problems_outcome_are_no_new_evidence():
    outcomes = torch.tensor([1.0] * 6 + [0.0] * 14, dtype=torch.float64)
    same = effective_size(outcomes.sum(), (outcomes**2).sum(), torch.tensor(20), 16)
    assert float(same) == pytest.approx(20)
    even = torch.full((20,), 0.25, dtype=torch.float64)
    assert float(effective_size(even.sum(), (even**2).sum(), torch.tensor(20), 16)) == 320


@pytest.mark.parametrize(("draws", "k"), [(1, 1), (4, 1), (16, 1), (16, 4)])
def test_ninety_five_of_a_hundred_intervals_hold_the_truth(draws, k):
    generator = torch.Generator().manual_seed(draws + k)
    problems, runs = 40, 2000
    solvable = torch.rand(runs, problems, generator=generator) ** 2  # p = u², so that E[(1 − p)^k] is known
    correct = torch.rand(runs, problems, draws, generator=generator) < solvable[..., None]
    truth = 1 - sum(math.comb(k, j) * (-1) ** j / (2 * j + 1) for j in range(k + 1))
    values = pass_at_k(correct.view(-1, draws), k).view(runs, problems)
    size = effective_size(values.sum(1), (values**2).sum(1), torch.tensor(problems), draws // k)
    low, high = wilson_interval(values.mean(1), size)
    held = float(((low <= truth) & (truth <= high)).double().mean())
    assert 0.92 <= held <= 0.98
