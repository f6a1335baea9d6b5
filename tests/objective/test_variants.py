import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional import objective as F
from lit_qrl.functional.importance import truncated_share
from lit_qrl.objective import CISPO, DAPO, GRPO, GSPO, SAPO, TBPO, DrGRPO, DualClipGRPO, PositiveGRPO
from tests.objective.batches import batch, value

ALL = [GRPO, DrGRPO, DAPO, GSPO, TBPO, DualClipGRPO, SAPO, CISPO, PositiveGRPO]


@pytest.mark.parametrize("kind", ALL)
def test_weights_of_one_leave_loss_and_gradient_bit_for_bit(kind):
    learner, data = batch(torch.float32)
    results = []
    for weights in (None, torch.ones(data.mask.shape)):
        data.weights = weights
        loss = value(kind(), learner, data)
        results.append((loss.detach(), *torch.autograd.grad(loss, learner)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_classes_call_their_formula_with_their_parameters():
    learner, data = batch(weights=torch.full((8, 6), 0.5, dtype=torch.float64))
    old, mask, a, w = data.learner_old_logprobs, data.mask, data.advantages, data.weights
    d = torch.where(mask, old - data.sampler_logprobs, 0.0)
    share = truncated_share(d, mask, 1.1)
    assert 0.1 < (share < 1).double().mean() < 0.9
    for objective, wanted in (
        (GRPO(clip_low=0.05, clip_high=0.1), F.clipped_surrogate(learner, old, a, mask, w, 0.05, 0.1)),
        (DrGRPO(), F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.2)),
        (DAPO(), F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.28)),
        (DualClipGRPO(dual_clip=1.05), F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.2, 1.05)),
        (DAPO(adaptive_clip=1.1), F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.28, share=share)),
        (
            DualClipGRPO(dual_clip=1.05, adaptive_clip=1.1),
            F.clipped_surrogate(learner, old, a, mask, w, 0.2, 0.2, 1.05, share),
        ),
        (PositiveGRPO(adaptive_clip=1.1), F.positive_surrogate(learner, old, a, mask, w, share=share)),
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
    dapo = DAPO()
    assert (dapo.clip_low, dapo.clip_high, dapo.reduction, dapo.kl_coefficient) == (0.2, 0.28, "token", 0.0)
    assert dapo.filter_zero_variance
    assert dapo.max_resample > 0
    assert dapo.overlong_penalty == (0.2, 1.0)
    assert (GSPO().clip_low, GSPO().clip_high) == (3e-4, 4e-4)
    assert vars(TBPO()).items() >= {"clip_high": 4e-4, "neg_low": 3e-4, "neg_high": 7e-4, "mismatch_cap": 2.0}.items()
    assert [kind.__name__ for kind in ALL if kind.carries_ratio] == ["TBPO"]


def test_the_only_update_of_a_rollout_needs_no_second_forward():
    learner, data = batch()
    data.learner_old_logprobs = None
    for kind in ALL:
        loss = kind().terms(learner, data).loss
        assert loss.isfinite().all()
    d = torch.where(data.mask, learner.detach() - data.sampler_logprobs, 0.0)
    wanted = F.tbpo(learner, learner.detach(), data.advantages, data.mask, d).loss
    assert torch.equal(TBPO().terms(learner, data).loss, wanted)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: GRPO(clip_low=1.5), "clip_low"),
        (lambda: DAPO(max_resample=-1), "max_resample"),
        (lambda: DAPO(overlong_penalty=(1.5, 1.0)), "overlong_penalty"),
        (lambda: DualClipGRPO(dual_clip=0.5), "dual_clip"),
        (lambda: GRPO(adaptive_clip=0.5), "objective.adaptive_clip"),
        (lambda: DAPO(adaptive_clip=2.0, old_logprobs="bypass"), "adaptive_clip moves.*bypass"),
        (lambda: GSPO(clip_high=-1.0), "clip_high"),
        (lambda: TBPO(mismatch_cap=0.5), "mismatch_cap"),
        (lambda: TBPO(old_logprobs="bypass"), "count the mismatch twice"),
        (lambda: SAPO(temperature_pos=0.0), "temperature_pos > 0"),
    ],
)
def test_bad_input_is_refused_at_construction(make, word):
    with pytest.raises(ConfigError, match=word):
        make()
