import pytest
import torch

from lit_qrl.callbacks.ais import AIS
from lit_qrl.functional.adaptive import ais_gate, ais_oracle, ais_weights
from tests.callbacks.corrections import context, rollout, trainer
from tests.functional.helpers import Ranks, no_host_sync


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_those_of_the_gate(level):
    given = context()
    with no_host_sync():
        got = AIS(clip=3.0, saturation=0.5, tolerance=0.6, sensitivity=0.2, level=level).correct(None, None, given)
    gate = ais_gate(given.log_ratio, given.mask, given.advantages, 3.0, 0.5, 0.6, 0.2, level=level)
    assert torch.equal(got.weights, ais_weights(given.log_ratio, given.mask, gate.alpha, 3.0, level=level))
    assert got.keep is None
    assert 0 < float(gate.alpha) < 1
    for name in ("alpha", "reliability", "necessity", "variance_penalty", "amplification", "mean_abs_log_ratio"):
        assert torch.equal(got.metrics[f"correction/{name}"], getattr(gate, name))
    assert torch.equal(got.metrics["correction/ess_ratio"], gate.ess_ratio)
    ratio = given.log_ratio if level == "token" else given.log_ratio.sum(dim=1, keepdim=True)
    clipped = ratio.exp().clamp(max=3.0)[given.mask if level == "token" else given.mask.any(dim=1, keepdim=True)]
    assert float(got.metrics["correction/clipped_cv"]) == pytest.approx(float(clipped.std() / clipped.mean()))
    assert not any("oracle" in name for name in got.metrics)
    asked = AIS(clip=3.0, saturation=0.5, tolerance=0.6, sensitivity=0.2, level=level, oracle=True)
    told = asked.correct(None, None, given)
    assert torch.equal(told.weights, got.weights)
    best = ais_oracle(given.log_ratio, given.mask, given.advantages, 3.0, level=level)
    assert torch.equal(told.metrics["correction/oracle_alpha"], best.simplified)
    assert torch.equal(got.metrics[f"correction/truncated_{level}s"], gate.truncated)


@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_rollout_scope_uses_one_alpha_for_all_mini_batches_and_minibatch_scope_that_of_each(scope):
    whole, callback = context(), AIS(saturation=0.5, scope=scope)
    callback.on_rollout_end(trainer(), None, rollout(whole))
    for part in (slice(0, 4), slice(4, 8)):
        given = context(part=part)
        over = whole if scope == "rollout" else given
        alpha = ais_gate(over.log_ratio, over.mask, over.advantages, saturation=0.5).alpha
        got = callback.correct(trainer(), None, given)
        assert torch.equal(got.weights, ais_weights(given.log_ratio, given.mask, alpha))


def test_alpha_is_global_over_ranks():
    whole = AIS(saturation=0.5).correct(None, None, context())
    parts = Ranks(2).run(
        lambda r, f: AIS(saturation=0.5).correct(None, None, context(all_reduce=f, part=slice(4 * r, 4 * r + 4)))
    )
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights, rtol=1e-10, atol=0)
