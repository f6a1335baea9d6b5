import math

import pytest
import torch

from lit_qrl.callbacks.mismatch import LENGTH_BINS, UpdateCounts, clip_edges
from lit_qrl.objective import GRPO, TBPO, DualClipGRPO
from lit_qrl.types import no_all_reduce
from tests.callbacks.corrections import context, rollout


def test_clip_edges_by_objective_and_sign():
    edges = {
        kind: [clip_edges(kind(), sign) for sign in ("negative", "positive")] for kind in (GRPO, TBPO, DualClipGRPO)
    }
    assert edges[GRPO][0] == edges[GRPO][1] == pytest.approx([math.log(0.8), math.log(1.2)])
    assert edges[TBPO][0] == pytest.approx([math.log(1 - 3e-4), math.log(1 + 7e-4)])
    assert edges[TBPO][1] == pytest.approx([math.log(1 + 4e-4)])
    assert clip_edges(DualClipGRPO(dual_clip=1.5), "negative")[-1] == pytest.approx(math.log(1.5))
    assert len(edges[DualClipGRPO][1]) == 2


def moved(given, spread=0.1):
    """Return what a learner that was trained on `given` scores, finite where it counts."""
    noise = spread * torch.randn(given.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.where(given.mask, given.learner_old + noise, 0.0)


def test_nothing_counted_is_nothing_told():
    counts = UpdateCounts()
    batch = rollout(context())
    batch.learner_old_logprobs = None
    counts.add(batch.sampler_logprobs, batch, 6, draw=True)
    assert counts.quantiles(no_all_reduce) == {}
    assert counts.histograms(GRPO(), 6, no_all_reduce) == []


@pytest.mark.parametrize(("by_weight", "by_keep"), [(True, False), (False, True), (True, True)])
def test_accepted_sequences_by_length(by_weight, by_keep):
    given = context(huge=0.0)
    batch, limit = rollout(given), 8
    rows = range(len(batch))
    dropped = {1} if by_weight and not by_keep else {5} if by_keep and not by_weight else {1, 5}
    ones = torch.ones(batch.mask.shape, dtype=torch.float64)
    if by_weight:
        batch.weights = ones.clone()
        batch.weights[1] = 0
    if by_keep:
        batch.keep = ones.bool()
        batch.keep[5] = False
    counts = UpdateCounts()
    counts.add(moved(given), batch, limit, draw=True)
    (drawn,) = [one for one in counts.histograms(GRPO(), limit, no_all_reduce) if one["title"] == "Accepted by length"]
    lengths = [int(batch.mask[row].sum()) for row in rows]
    for index, share in enumerate(drawn["counts"]["share of sequences"]):
        low, high = index * limit / LENGTH_BINS, (index + 1) * limit / LENGTH_BINS
        inside = [row for row in rows if lengths[row] and low < lengths[row] <= high]
        expected = sum(row not in dropped for row in inside) / max(len(inside), 1)
        assert share == pytest.approx(expected), (index, inside)
