"""Which corrections wait for a forward pass of their own, and that the training forward's gives the same numbers."""

import math
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import AIS, GeometricRejection, Guard, MaskedIS, RLCallback, TokenVeto, TruncatedIS
from lit_qrl.loop.budget import TokenBudget
from lit_qrl.loop.contracts import MicroBatches
from lit_qrl.loop.correction import ScoredWhen, scored_when, weigh, weigh_here
from lit_qrl.module import GRPOModule
from lit_qrl.objective import GRPO, TBPO
from lit_qrl.policy import CausalPolicy
from lit_qrl.types import Correction
from tests.callbacks.corrections import context, rollout
from tests.functional.helpers import no_host_sync
from tests.tables import csv_rows
from tests.test_module import first_gradient
from tests.tiny_run import fit

LOCAL = [TruncatedIS(), TruncatedIS("sequence"), TruncatedIS("geometric"), MaskedIS(), MaskedIS("sequence")]
WHOLE = [
    AIS(),
    TruncatedIS("sequence", upper="auto"),
    TruncatedIS(upper=float("inf")),
    TokenVeto(),
    GeometricRejection(),
]


def learner(objective, callbacks=(), passes=1, mini_batches=1, parts=2, dropout=False):
    data = SimpleNamespace(passes=passes, mini_batches=mini_batches)
    data.budget = MicroBatches(parts) if parts else TokenBudget(None)
    policy, trainer = SimpleNamespace(dropout=dropout), SimpleNamespace(callbacks=list(callbacks))
    return SimpleNamespace(objective=objective, data=data, policy=policy, trainer=trainer)


def needs_learner_old(learner):
    return scored_when(learner) is ScoredWhen.BEFORE


@pytest.mark.parametrize("callback", LOCAL, ids=lambda c: f"{type(c).__name__}-{c.level}")
def test_a_correction_by_sequences_waits_only_with_several_updates(callback):
    assert not needs_learner_old(learner(GRPO(), [callback]))
    assert needs_learner_old(learner(GRPO(), [callback], mini_batches=2))
    assert needs_learner_old(learner(GRPO(old_logprobs="policy_gradient"), [callback], passes=2))
    assert needs_learner_old(learner(GRPO(normalize_weights="token"), [callback]))
    assert needs_learner_old(learner(GRPO(), [callback, TokenVeto()]))


@pytest.mark.parametrize("callback", WHOLE, ids=lambda c: type(c).__name__)
def test_what_looks_at_the_whole_batch_waits_unless_one_pass_sees_it(callback):
    assert needs_learner_old(learner(GRPO(), [callback]))
    assert not needs_learner_old(learner(GRPO(), [callback], parts=1))
    assert not needs_learner_old(learner(GRPO(normalize_weights="token"), [callback], parts=1))
    assert needs_learner_old(learner(GRPO(), [callback], parts=1, passes=2))
    assert needs_learner_old(learner(GRPO(), [callback], parts=1, mini_batches=2))
    assert needs_learner_old(learner(GRPO(), [callback], parts=None))  # which may take more
    assert needs_learner_old(learner(GRPO(), [AIS(scope="rollout")], parts=1))  # a gate of the rollout


def test_without_corrections():
    for mode, several in (("decoupled", True), ("bypass", False), ("policy_gradient", False)):
        assert not needs_learner_old(learner(GRPO(old_logprobs=mode)))
        assert needs_learner_old(learner(GRPO(old_logprobs=mode), passes=3)) is several
    assert not needs_learner_old(learner(TBPO()))
    assert needs_learner_old(learner(TBPO(old_logprobs="policy_gradient"), mini_batches=2))
    assert needs_learner_old(learner(GRPO(kl_coefficient=0.1, kl_in="reward")))
    assert needs_learner_old(learner(GRPO(), dropout=True))  # whose training forward is not learner_old's


@pytest.mark.parametrize("limit", [{"kl_ceiling": 1.0}, {"ess_floor": 0.5}])
@pytest.mark.parametrize("mode", ["decoupled", "bypass", "policy_gradient"])
def test_a_limit_of_the_guard_is_measured_before_the_update(mode, limit):
    assert needs_learner_old(learner(GRPO(old_logprobs=mode), [Guard(**limit)]))
    assert not needs_learner_old(learner(GRPO(old_logprobs=mode), [Guard()]))


class Early(RLCallback):
    """Wants learner_old's log-probs before the update, and does nothing."""

    needs_learner_old = True


def row_of(folder):
    return {name: float(value) for name, value in csv_rows(folder / "run" / "metrics.csv")[0].items() if value}


def one_update(folder, monkeypatch, callbacks, objective, **data):
    """Return gradient, metrics and number of scoring passes of an iteration with one update."""
    calls = []
    with monkeypatch.context() as patch:
        score = GRPOModule.score
        patch.setattr(GRPOModule, "score", lambda self, *a, **k: calls.append(1) or score(self, *a, **k))
        gradient = first_gradient(folder, callbacks, objective=objective, data={"micro_batches": 2, **data})
    return gradient, row_of(folder), len(calls)


@pytest.mark.parametrize(
    ("callback", "objective", "parts"),
    [
        (lambda: TruncatedIS(upper=1.001), GRPO(scale="none"), 2),
        (lambda: MaskedIS(upper=1.002), GRPO(scale="none", reduction="token"), 2),
        (lambda: TruncatedIS("sequence", upper=1.01), GRPO(old_logprobs="policy_gradient"), 2),
        (lambda: MaskedIS("geometric", upper=1.001), GRPO(scale="none"), 2),
        (None, TBPO(mismatch_cap=1.001), 2),
        (lambda: TruncatedIS(upper=1.001), GRPO(scale="none"), 1),
        (lambda: TruncatedIS(upper=1.001), GRPO(scale="none", normalize_weights="sequence"), 1),
        (lambda: AIS(saturation=1e-6, clip=1.001), GRPO(scale="none"), 1),
        (lambda: TokenVeto(0.998), GRPO(scale="none", reduction="token"), 1),
        (lambda: GeometricRejection(0.9999, 1.0001), GRPO(scale="none"), 1),
    ],
)
def test_the_training_forward_gives_what_a_scoring_pass_gives(tmp_path, monkeypatch, callback, objective, parts):
    own = [callback()] if callback else []
    other = [callback()] if callback else []
    one = one_update(tmp_path / "one", monkeypatch, own, objective, micro_batches=parts)
    two = one_update(tmp_path / "two", monkeypatch, [*other, Early()], objective, micro_batches=parts)
    alike = GRPO(scale=objective.scale, reduction=objective.reduction)
    plain = one_update(tmp_path / "plain", monkeypatch, [], alike, micro_batches=parts)
    assert (one[2], two[2]) == (0, 1)
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=1e-6 * float(two[0].abs().max()))
    assert float((one[0] - plain[0]).norm()) > 1e-4 * float(plain[0].norm())  # it corrects something
    measured = {name for name in two[1] if name.startswith(("mismatch/", "correction/"))}
    assert measured
    assert measured <= set(one[1])
    for name in measured:
        assert one[1][name] == pytest.approx(two[1][name], rel=1e-3, abs=1e-5), name


def test_each_mini_batch_is_corrected_once(tmp_path, monkeypatch):
    corrected = []
    monkeypatch.setattr(AIS, "correct", lambda *given, own=AIS.correct: corrected.append(1) or own(*given))
    for parts in (1, 2):
        corrected.clear()
        one_update(tmp_path / str(parts), monkeypatch, [AIS()], GRPO(), micro_batches=parts)
        assert len(corrected) == 1


def test_a_pass_of_which_all_is_rejected_takes_no_step(tmp_path, monkeypatch):
    class Reject(RLCallback):
        def correct(self, trainer, module, context):
            return Correction(keep=torch.zeros_like(context.mask))

    _, row, scored = one_update(tmp_path, monkeypatch, [Reject()], GRPO(), micro_batches=1)
    assert (scored, row["guard/skipped_steps"]) == (0, 1.0)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_token_to_which_the_learner_gives_no_number_leaves_the_loss(tmp_path, monkeypatch, parts):
    forward = CausalPolicy.forward

    def poisoned(self, batch, *args, **kwargs):
        scores = forward(self, batch, *args, **kwargs)
        logprobs = scores.logprobs.clone()
        logprobs[0, 0] = float("nan")
        return scores._replace(logprobs=logprobs)

    monkeypatch.setattr(CausalPolicy, "forward", poisoned)
    options = {"data": {"micro_batches": parts}, "trainer": {"max_epochs": 1}}
    _, module, _ = fit(tmp_path, callbacks=[AIS()], guard={"max_nonfinite_fraction": 0.5}, **options)
    row = row_of(tmp_path)
    assert math.isfinite(row["update/loss"])
    assert math.isfinite(row["correction/alpha"])
    assert "guard/vetoed_steps" not in row
    assert all(torch.isfinite(parameter).all() for parameter in module.policy.parameters())


def test_weighing_a_micro_batch_waits_for_nothing():
    given = context(torch.float32)
    batch = rollout(given)
    batch.learner_old_logprobs = None
    trainer = SimpleNamespace(callbacks=[MaskedIS()])
    with no_host_sync():
        weigh_here(learner(GRPO(), trainer.callbacks), SimpleNamespace(batch=batch), given.learner_old)
    whole = rollout(given)
    weigh(SimpleNamespace(trainer=trainer), whole, given.learner_old)
    assert torch.equal(batch.weights, whole.weights)
    assert batch.keep is None


def test_what_was_scored_is_not_weighed_again():
    batch = rollout(context())
    trainer = SimpleNamespace(callbacks=[TruncatedIS()])
    weigh_here(learner(GRPO(), trainer.callbacks), SimpleNamespace(batch=batch), batch.learner_old_logprobs + 1)
    assert batch.weights is None


def test_a_correction_that_rejects_must_see_the_whole_batch():
    class Rejects(RLCallback):
        needs = "sequence"

        def correct(self, trainer, module, context):
            return Correction(keep=context.mask)

    batch = rollout(context())
    batch.learner_old_logprobs = None
    with pytest.raises(ValueError, match="Set its needs to 'batch'"):
        weigh_here(learner(GRPO(), [Rejects()]), SimpleNamespace(batch=batch), batch.sampler_logprobs)
