import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional import objective as F
from lit_qrl.objective import CISPO, DAPO, GRPO, GSPO, SAPO, TBPO, DrGRPO, DualClipGRPO, Objective, PositiveGRPO
from lit_qrl.types import RolloutBatch
from tests.functional.helpers import rows

ALL = [GRPO, DrGRPO, DAPO, GSPO, TBPO, DualClipGRPO, SAPO, CISPO, PositiveGRPO]


def batch(dtype=torch.float64, **changes):
    """Return the learner's current log-probs and a batch whose learner_old is its neighbour."""
    learner_old, sampler, mask, advantages = rows(dtype, spread=0.2, huge=0.0)
    learner = torch.where(mask, learner_old, 0.0) + 0.1 * torch.randn(
        mask.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).to(dtype)
    b = len(mask)
    fields = {
        "tokens": torch.ones(b, 2 + mask.shape[1], dtype=torch.long),
        "prompt_length": torch.full((b,), 2),
        "mask": mask,
        "sampler_logprobs": sampler,
        "learner_old_logprobs": learner_old,
        "rewards": advantages + 0.5,
        "advantages": advantages,
        "group": torch.arange(b) // 2,
        "version": torch.zeros(b, dtype=torch.long),
        "stopped": torch.ones(b, dtype=torch.bool),
    }
    return learner.requires_grad_(), RolloutBatch(**{**fields, **changes})


def value(objective, learner, data):
    terms = objective.terms(learner, data)
    return objective.loss(terms.loss, data, objective.total(objective.effective_mask(data), 6))


@pytest.mark.parametrize("kind", ALL)
def test_micro_batches_add_up_in_value_and_gradient(kind):
    learner, data = batch(keep=torch.arange(8)[:, None].expand(8, 6) != 1)
    objective = kind()
    whole = value(objective, learner, data)
    (gradient,) = torch.autograd.grad(whole, learner)
    for cuts in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[7, 0], [3], [1, 2, 4], [5, 6]]):
        total = sum(
            objective.total(objective.effective_mask(data.select(torch.tensor(cut), trim=False)), 6) for cut in cuts
        )
        loss, summed = 0.0, torch.zeros_like(learner)
        for cut in cuts:
            part = data.select(torch.tensor(cut), trim=False)
            piece = learner.detach()[cut].requires_grad_()
            micro = objective.loss(objective.terms(piece, part).loss, part, total)
            micro.backward()
            loss += float(micro.detach())
            summed[cut] += piece.grad
        assert loss == pytest.approx(float(whole.detach()), rel=1e-12)
        torch.testing.assert_close(summed, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ALL)
def test_at_equal_policies_weights_of_one_leave_loss_and_gradient_bit_for_bit(kind):
    _, data = batch(torch.float32)
    data.learner_old_logprobs = data.sampler_logprobs = torch.where(data.mask, data.learner_old_logprobs, 0.0)
    results = []
    for weights in (None, torch.ones(data.mask.shape)):
        data.weights = weights
        x = data.sampler_logprobs.clone().requires_grad_()
        loss = value(kind(), x, data)
        loss.backward()
        results.append((loss.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_classes_call_their_formula_with_their_parameters():
    learner, data = batch(weights=torch.full((8, 6), 0.5, dtype=torch.float64))
    old, mask, a, w = data.learner_old_logprobs, data.mask, data.advantages, data.weights
    d = torch.where(mask, old - data.sampler_logprobs, 0.0)
    for objective, wanted in (
        (GRPO(clip_low=0.05, clip_high=0.1), F.clipped_surrogate(learner, old, a, mask, w, 0.05, 0.1)),
        (DrGRPO(), F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.2)),
        (DAPO(), F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.28)),
        (DualClipGRPO(dual_clip=1.05), F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.2, 1.05)),
        (PositiveGRPO(), F.positive_surrogate(learner, old, a, mask, w)),
        (GSPO(clip_low=0.01), F.gspo(learner, old, a, mask, w, 0.01, 4e-4)),
        (SAPO(temperature_pos=2.0), F.sapo(learner, old, a, mask, w, 2.0, 1.05)),
        (CISPO(clip_high=0.1), F.cispo(learner, old, a, mask, w, 1.0, 0.1)),
    ):
        assert torch.equal(objective.terms(learner, data).loss, wanted.loss), type(objective).__name__
    tbpo = TBPO(clip_high=0.01, neg_low=0.02, neg_high=0.03, mismatch_cap=1.1)
    wanted = F.tbpo(learner, old, a, mask, d, 0.01, 0.02, 0.03, 1.1).loss * 0.5
    assert torch.equal(tbpo.terms(learner, data).loss, wanted)


def test_defaults_of_the_papers():
    assert (GRPO().scale, GRPO().reduction) == ("group", "sequence")
    assert (DrGRPO().scale, DrGRPO().reduction) == ("none", "constant")
    dapo = DAPO()
    assert (dapo.clip_low, dapo.clip_high, dapo.reduction, dapo.kl_coefficient) == (0.2, 0.28, "token", 0.0)
    assert dapo.filter_zero_variance
    assert dapo.max_resample > 0
    assert dapo.overlong_penalty == (0.2, 1.0)
    assert (GSPO().clip_low, GSPO().clip_high) == (3e-4, 4e-4)
    assert vars(TBPO()).items() >= {"clip_high": 4e-4, "neg_low": 3e-4, "neg_high": 7e-4, "mismatch_cap": 2.0}.items()
    assert [kind.__name__ for kind in ALL if kind.carries_ratio] == ["TBPO"]


def test_advantages_follow_the_scale():
    rewards = torch.tensor([1.0, 0.0, 3.0, 1.0])
    assert DrGRPO().advantages(rewards, 2).tolist() == [0.5, -0.5, 1.0, -1.0]
    assert GRPO().advantages(rewards, 2).tolist() == pytest.approx([2**-0.5, -(2**-0.5)] * 2, rel=1e-5)


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


def test_the_only_update_of_a_rollout_needs_no_second_forward():
    learner, data = batch()
    data.learner_old_logprobs = None
    for kind in ALL:
        loss = kind().terms(learner, data).loss
        assert loss.isfinite().all()
    d = torch.where(data.mask, learner.detach() - data.sampler_logprobs, 0.0)
    wanted = F.tbpo(learner, learner.detach(), data.advantages, data.mask, d).loss
    assert torch.equal(TBPO().terms(learner, data).loss, wanted)


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


def test_kl_in_the_loss_is_added_after_the_weights_and_has_a_gradient():
    learner, data = batch(weights=torch.zeros(8, 6, dtype=torch.float64))
    data.reference_logprobs = torch.where(data.mask, data.learner_old_logprobs, torch.nan) - 0.3
    for estimator, formula in (("k1", F.k1_penalty), ("k2", F.k2_penalty), ("k3", F.k3_penalty)):
        terms = GRPO(kl_coefficient=0.04, kl_estimator=estimator).terms(learner, data)
        wanted = torch.where(data.mask, 0.04 * formula(learner, data.reference_logprobs), 0.0)
        torch.testing.assert_close(terms.loss, wanted, rtol=1e-12, atol=1e-15)
        (gradient,) = torch.autograd.grad(terms.loss.sum(), learner)
        assert gradient.isfinite().all()
        assert (gradient[data.mask] != 0).all()
        total, count = terms.metrics["update/reference_kl"].tolist()
        assert (total, count) == pytest.approx((float(wanted.detach().sum()) / 0.04, int(data.mask.sum())))


def test_shaped_rewards():
    _, data = batch()
    assert GRPO().shaped_rewards(data, 6) is data.rewards
    data.reference_logprobs = data.learner_old_logprobs - 0.5
    lengths = data.mask.sum(1)
    kl = GRPO(kl_coefficient=0.1, kl_estimator="k1", kl_in="reward")
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


def test_a_kl_without_a_reference_says_what_to_do():
    learner, data = batch()
    with pytest.raises(ValueError, match="reference"):
        GRPO(kl_coefficient=0.1).terms(learner, data)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: GRPO(scale="groups"), "Did you mean 'group'"),
        (lambda: GRPO(reduction="mean"), "reduction"),
        (lambda: GRPO(old_logprobs="recompute"), "old_logprobs"),
        (lambda: GRPO(kl_estimator="k4"), "kl_estimator"),
        (lambda: GRPO(kl_in="advantage"), "kl_in"),
        (lambda: GRPO(kl_coefficient=-0.1), "kl_coefficient"),
        (lambda: GRPO(entropy_coefficient=-0.1), "entropy_coefficient"),
        (lambda: GRPO(normalize_weights="batch"), "normalize_weights"),
        (lambda: GRPO(clip_low=1.5), "clip_low"),
        (lambda: DAPO(max_resample=-1), "max_resample"),
        (lambda: DAPO(overlong_penalty=(1.5, 1.0)), "overlong_penalty"),
        (lambda: DualClipGRPO(dual_clip=0.5), "dual_clip"),
        (lambda: GSPO(clip_high=-1.0), "clip_high"),
        (lambda: TBPO(mismatch_cap=0.5), "mismatch_cap"),
        (lambda: TBPO(old_logprobs="bypass"), "twice"),
        (lambda: SAPO(temperature_pos=0.0), "SAPO"),
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
