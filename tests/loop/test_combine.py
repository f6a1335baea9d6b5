from itertools import permutations

import pytest
import torch

from lit_qrl.callbacks.ais import AIS
from lit_qrl.callbacks.rejection import GeometricRejection, OffPolicySequenceMask, RatioRejection, TokenVeto
from lit_qrl.callbacks.truncated import MaskedIS, TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.functional.importance import batch_normalized
from lit_qrl.functional.mismatch import mismatch_metrics
from lit_qrl.loop.correction import check_combination, check_estimated, combine
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.objective import CISPO, GRPO, GSPO, SAPO, TBPO, DualClipGRPO, PositiveGRPO
from lit_qrl.types import Correction
from tests.callbacks.corrections import context, rollout
from tests.functional.helpers import no_host_sync


class Half(RLCallback):
    def correct(self, trainer, module, context):
        return Correction(weights=torch.full_like(context.log_ratio, 0.3), metrics={"correction/half": torch.ones(())})


class Random(RLCallback):
    def correct(self, trainer, module, context):
        generator = torch.Generator().manual_seed(7)
        return Correction(weights=torch.rand(context.mask.shape, generator=generator).to(context.log_ratio.dtype))


def test_permuting_the_callbacks_changes_no_bit():
    given = context(torch.float32)
    callbacks = [AIS(), GeometricRejection(0.5, 2.0), TokenVeto(count_rejected=True), Half(), Random()]
    results = []
    for order in permutations(callbacks):
        with no_host_sync():
            weights, keep, metrics = combine([c.correct(None, None, given) for c in order], given.mask)
        results.append((weights, keep, {name: float(value) for name, value in metrics.items()}))
    for weights, keep, metrics in results[1:]:
        assert torch.equal(weights, results[0][0])
        assert torch.equal(keep, results[0][1])
        assert metrics == results[0][2]


def test_weights_multiply_and_keeps_are_anded():
    given = context()
    parts = [c.correct(None, None, given) for c in (AIS(), Half(), GeometricRejection(0.5, 2.0), TokenVeto())]
    weights, keep, metrics = combine(parts, given.mask)
    torch.testing.assert_close(weights, parts[0].weights * 0.3, rtol=1e-15, atol=0)
    assert torch.equal(keep, parts[2].keep & parts[3].keep)
    inside = given.mask
    assert float(metrics["correction/weight_mean"]) == pytest.approx(float(weights[inside].mean()))
    assert float(metrics["correction/weight_cv"]) == pytest.approx(
        float(weights[inside].std() / weights[inside].mean())
    )
    assert float(metrics["correction/weight_max"]) == float(weights[inside].max())
    assert float(metrics["correction/reweighted_tokens"]) == 1.0
    assert float(metrics["correction/rejected_tokens"]) == pytest.approx(float((~keep)[inside].double().mean()))
    gone = sum(bool(m.any()) and not bool((m & k).any()) for m, k in zip(inside, keep, strict=True))
    assert float(metrics["correction/rejected_sequences"]) == pytest.approx(gone / 7)
    assert metrics.keys() > {"correction/alpha", "correction/vetoed_sequences", "correction/half"}


def test_wrong_shapes_and_clashing_names_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert combine([], mask) == (None, None, {})
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2,\)"):
        combine([Correction(weights=torch.ones(2))], mask)
    with pytest.raises(ValueError, match="keep"):
        combine([Correction(keep=mask[:1])], mask)
    twice = Correction(metrics={"correction/x": torch.zeros(())})
    with pytest.raises(ValueError, match="correction/x"):
        combine([twice, twice], mask)


@pytest.mark.parametrize(
    "callbacks, objective",
    [
        ([AIS(), TruncatedIS()], None),
        ([MaskedIS(), AIS(), TokenVeto()], GRPO()),
        ([TruncatedIS("geometric"), MaskedIS("sequence")], None),
        ([AIS()], TBPO()),
        ([TokenVeto(), MaskedIS()], TBPO()),
    ],
)
def test_two_carriers_of_the_ratio_are_refused_by_name(callbacks, objective):
    with pytest.raises(ConfigError, match=r"and .* ratio learner_old / sampler") as error:
        check_combination(callbacks, objective)
    for callback in callbacks:
        assert not callback.carries_ratio or type(callback).__name__ in str(error.value)
    assert objective is None or not objective.carries_ratio or "TBPO" in str(error.value)
    with pytest.raises(ConfigError, match="bypass"):  # a ratio against the sampler is not corrected once more
        check_combination([TruncatedIS()], GRPO(old_logprobs="bypass"))
    check_combination([TokenVeto()], GRPO(old_logprobs="bypass"))


@pytest.mark.gpu
def test_on_a_device_nothing_waits_for_it():
    given = context(torch.float32)
    moved = {
        name: value.cuda() if isinstance((value := getattr(given, name)), torch.Tensor) else value
        for name in given.__dataclass_fields__
    }
    given = type(given)(**moved)
    callbacks = [
        AIS(),
        AIS(level="sequence"),
        TruncatedIS(),
        TruncatedIS("sequence", upper="auto"),
        TruncatedIS("geometric", upper=float("inf")),
        MaskedIS(),
        MaskedIS("sequence"),
        GeometricRejection(),
        RatioRejection(0.01, divergence="k3"),
        RatioRejection(2.0, over="max"),
        RatioRejection(0.1, divergence="k2", over="token"),
        TokenVeto(),
        OffPolicySequenceMask(0.1),
    ]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for callback in callbacks:
            combine([callback.correct(None, None, given)], given.mask)
        mismatch_metrics(given.learner_old, given.sampler, given.mask)
        normalized = batch_normalized(torch.ones_like(given.log_ratio), given.mask)
        terms = [TBPO, GRPO, GSPO, SAPO, CISPO, DualClipGRPO, PositiveGRPO]
        batch = rollout(given)
        losses = [kind().terms(given.sampler.clone().requires_grad_(), batch).loss for kind in terms]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(normalized[given.mask], torch.ones_like(normalized[given.mask]))
    assert all(loss.isfinite().all() for loss in losses)


def test_estimated_log_probs_are_weighed_token_by_token():
    allowed = [AIS(), TruncatedIS(), MaskedIS(), RatioRejection(2.0, over="token"), RatioRejection(2.0, over="max")]
    for callback in [*allowed, TokenVeto(), Half()]:
        for objective in (GRPO(), CISPO(), SAPO(), DualClipGRPO(), PositiveGRPO()):
            check_estimated([callback], objective)
    refused = [AIS(level="sequence"), TruncatedIS("geometric"), MaskedIS("sequence"), OffPolicySequenceMask(0.1)]
    for callback in [*refused, GeometricRejection(), RatioRejection(2.0, over="sum")]:
        with pytest.raises(ConfigError, match=rf"{type(callback).__name__} multiplies.*token"):
            check_estimated([TokenVeto(), callback], GRPO())
    for objective in (GSPO(), TBPO()):
        with pytest.raises(ConfigError, match="needs autoregressive log-probs"):
            check_estimated([], objective)
