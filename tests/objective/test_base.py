from itertools import product

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional import objective as F
from lit_qrl.functional.advantage import group_advantages, whitened
from lit_qrl.functional.penalty import kl_penalty
from lit_qrl.objective import DAPO, GRPO, Distillation, DrGRPO, Objective
from tests.objective.batches import batch, value


def test_advantages_follow_the_scale():
    rewards = torch.tensor([1.0, 0.0, 3.0, 1.0])
    assert DrGRPO().advantages(rewards, 2).tolist() == [0.5, -0.5, 1.0, -1.0]
    assert GRPO().advantages(rewards, 2).tolist() == pytest.approx([2**-0.5, -(2**-0.5)] * 2, rel=1e-5)


def test_advantages_of_a_rollout_are_whitened_over_its_tokens():
    _, data = batch()
    shaped = GRPO(scale="whiten", baseline="leave_one_out").rollout_advantages(data, 2, 6)
    centred = group_advantages(data.rewards, 2, "none", baseline="leave_one_out")
    assert torch.equal(shaped, whitened(centred, data.mask.sum(1)))
    plain = GRPO(baseline="none", scale="none").rollout_advantages(data, 2, 6)
    assert torch.equal(plain, data.rewards)


@pytest.mark.parametrize("reduction", ["sequence", "token", "constant", "sequence_sum", "token_sum"])
def test_truncated_completions_leave_the_loss_as_if_rejected(reduction):
    learner, data = batch()
    data.stopped = torch.arange(8) % 3 != 1
    masked = value(GRPO(mask_truncated=True, reduction=reduction), learner, data)
    (gradient,) = torch.autograd.grad(masked, learner)
    assert not gradient[~data.stopped].any()
    assert gradient[data.stopped].any()
    data.keep = data.stopped[:, None].expand(8, 6)
    rejected = value(GRPO(reduction=reduction), learner, data)
    assert torch.equal(masked, rejected)
    data.keep = None
    assert not torch.equal(value(GRPO(reduction=reduction), learner, data), rejected)


def test_ways_to_use_the_old_logprobs():
    learner, data = batch()
    gradients = {}
    for mode, old in (
        ("decoupled", data.learner_old_logprobs),
        ("bypass", data.sampler_logprobs),
        ("policy_gradient", learner.detach()),
    ):
        loss = GRPO(old_logprobs=mode).terms(learner, data).loss
        assert torch.equal(loss, F.clipped_surrogate(learner, old, data.advantages, data.mask).loss), mode
        (gradients[mode],) = torch.autograd.grad(loss.sum(), learner)
    # Without clipping the gradient is −A for every token.
    plain = torch.where(data.mask, -data.advantages[:, None].expand(8, 6), 0.0)
    torch.testing.assert_close(gradients["policy_gradient"], plain, rtol=1e-12, atol=0)
    assert not torch.equal(gradients["decoupled"], gradients["bypass"])


def test_rejected_tokens_leave_loss_and_denominator():
    learner, data = batch()
    data.keep = torch.ones_like(data.mask)
    data.keep[1] = data.keep[5, 2] = False
    kept = data.mask & data.keep
    objective = DAPO()
    terms = objective.terms(learner, data)
    assert torch.equal(terms.loss[~kept], torch.zeros_like(terms.loss[~kept]))
    assert float(objective.total(objective.effective_mask(data), 6)) == int(kept.sum())
    assert terms.metrics["update/kl"][1] == int(kept.sum())


def test_denominators():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert float(GRPO().total(mask, 7)) == 2
    assert float(DAPO().total(mask, 7)) == 2
    assert float(DAPO().total(torch.tensor([[True, True, True], [True, False, False]]), 7)) == 4
    assert float(DrGRPO().total(mask, 7)) == 14


def test_the_kl_in_the_loss_is_that_of_the_policy_that_drew_the_tokens_and_has_no_weights():
    learner, data = batch(weights=torch.zeros(8, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="reference"):
        GRPO(kl_coefficient=0.1).terms(learner, data)
    data.reference_logprobs = torch.where(data.mask, data.learner_old_logprobs, torch.nan) - 0.3
    drew = {"decoupled": data.learner_old_logprobs, "bypass": data.sampler_logprobs}
    for estimator, mode in product(("k1", "k2", "k3", "k3+"), drew):
        terms = GRPO(kl_coefficient=0.04, kl_estimator=estimator, old_logprobs=mode).terms(learner, data)
        own, reference, old = (one[data.mask][None] for one in (learner, data.reference_logprobs, drew[mode]))
        wanted = 0.04 * kl_penalty(own, reference, estimator, old)
        torch.testing.assert_close(terms.loss[data.mask][None], wanted, rtol=1e-12, atol=1e-15)
        assert not terms.loss[~data.mask].any()
        gradients = [torch.autograd.grad(loss.sum(), learner)[0] for loss in (terms.loss, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
        total, count = terms.metrics["update/reference_kl"].tolist()
        assert (total, count) == pytest.approx((float(wanted.detach().sum()) / 0.04, own.numel()))
    assert GRPO(kl_coefficient=0.04).kl_estimator == "k3+"
    clamped = GRPO(kl_coefficient=1.0, kl_estimator="k2", kl_output_clamp=1e-4).terms(learner, data).loss
    assert float(clamped.detach().max()) == 1e-4


def test_distillation_is_the_kl_over_the_vocabulary_alone():
    learner, data = batch(weights=torch.zeros(8, 6, dtype=torch.float64))
    divergence = torch.rand_like(learner).detach().requires_grad_()
    objective = Distillation(kl_coefficient=2.0)
    assert objective.diverges
    assert objective.penalized
    terms = objective.terms(learner, data, divergence=divergence)
    assert torch.equal(terms.loss, torch.where(data.mask, 2.0 * divergence, 0.0))
    for refused in ({"kl_coefficient": 0.0}, {"kl_in": "reward"}):
        with pytest.raises(ConfigError):
            Distillation(**refused)


def test_shaped_rewards():
    _, data = batch()
    assert GRPO().shaped_rewards(data, 6) is data.rewards
    data.reference_logprobs = data.learner_old_logprobs - 0.5
    lengths = data.mask.sum(1)
    kl = GRPO(kl_coefficient=0.1, kl_in="reward")
    assert kl.kl_estimator == "k1"
    torch.testing.assert_close(kl.shaped_rewards(data, 6), data.rewards - 0.1 * 0.5 * lengths)
    assert torch.equal(kl.terms(*batch()).loss, GRPO().terms(*batch()).loss)
    long = DAPO(overlong_penalty=(0.5, 2.0)).shaped_rewards(data, 6) - data.rewards
    wanted = [0.0 if n <= 3 else -2.0 * (n - 3) / 3 for n in lengths.tolist()]
    torch.testing.assert_close(long, torch.tensor(wanted, dtype=torch.float64))


def test_entropy_bonus():
    learner, data = batch()
    entropy = torch.rand_like(learner).detach().requires_grad_()
    plain = GRPO().terms(learner, data).loss
    bonus = GRPO(entropy_coefficient=0.01).terms(learner, data, entropy).loss
    torch.testing.assert_close(bonus, plain - 0.01 * torch.where(data.mask, entropy, 0.0))
    with pytest.raises(ValueError, match="entropy"):
        GRPO(entropy_coefficient=0.01).terms(learner, data)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: GRPO(scale="groups"), "Did you mean 'group'"),
        (lambda: GRPO(reduction="mean"), "reduction"),
        (lambda: GRPO(baseline="leave_one"), "Did you mean 'leave_one_out'"),
        (lambda: GRPO(old_logprobs="recompute"), "old_logprobs"),
        (lambda: GRPO(kl_estimator="k4"), "kl_estimator"),
        (lambda: GRPO(kl_in="advantage"), "kl_in"),
        (lambda: GRPO(kl_in="reward", kl_estimator="k3+"), "k3\\+ is made for the KL's gradient"),
        (lambda: GRPO(kl_input_clamp=0.0), "objective.kl_input_clamp"),
        (lambda: GRPO(kl_output_clamp=-10.0), "objective.kl_output_clamp"),
        (lambda: GRPO(kl_coefficient=-0.1), "kl_coefficient"),
        (lambda: GRPO(entropy_coefficient=-0.1), "entropy_coefficient"),
        (lambda: GRPO(load_balance_coefficient=-0.1), "load_balance_coefficient"),
        (lambda: GRPO(normalize_weights="batch"), "normalize_weights"),
    ],
)
def test_bad_input_is_refused_at_construction(make, word):
    with pytest.raises(ConfigError, match=word):
        make()


def test_a_new_objective_is_one_method():
    class Reinforce(Objective):
        def surrogate(self, logprobs, old_logprobs, mask, batch):
            return F.clipped_surrogate(logprobs, logprobs, batch.advantages, mask, batch.weights)

    learner, data = batch()
    assert value(Reinforce(reduction="token"), learner, data).requires_grad
