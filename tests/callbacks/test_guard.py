from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from lit_qrl.callbacks import Guard, RLCallback, TruncatedIS
from lit_qrl.errors import StoppedError
from lit_qrl.loop.state import IterationState
from lit_qrl.objective import GRPO
from lit_qrl.run.event_log import read_jsonl
from tests.tables import csv_rows
from tests.tiny_run import DigitReward, DigitTask, build, calling, fit, parameters_of


def events(folder):
    kinds = [event["kind"] for event in read_jsonl(folder / "run" / "events.jsonl")]
    told = ("update", "sampler", "mismatch_at_start")  # once, whatever happens then
    return [kind for kind in kinds if kind not in told]


def changed(change):
    """A callback that changes the sampler's log-probs of every rollout."""
    return calling(on_rollout_end=lambda trainer, module, batch: change(batch.sampler_logprobs))


def poison(tokens):
    return changed(lambda logprobs: logprobs[0, :tokens].fill_(float("nan")))


def unlikely(logprob=-200.0):
    """Make one token all but impossible for the sampler."""
    return changed(lambda logprobs: logprobs[0, :1].fill_(logprob))


def shifted():
    """Make the sampler seem a nat away from where it is, without correcting anything."""
    return changed(lambda logprobs: logprobs.add_(1.0))


class PoisonGradient(Callback):
    def __init__(self, times):
        self.times = times

    def on_after_backward(self, trainer, pl_module):
        if self.times > 0:
            self.times -= 1
            next(pl_module.policy.parameters()).grad[0, 0] = float("inf")


def start(folder):
    _, module, _ = build(folder)
    module.policy.configure()
    return parameters_of(module)


def test_a_token_without_a_finite_log_prob_leaves_the_loss(tmp_path):
    _, module, _ = fit(tmp_path, callbacks=[poison(1)], guard={"max_nonfinite_fraction": 0.5})
    assert torch.isfinite(parameters_of(module)).all()
    assert events(tmp_path).count("nonfinite_logprobs") == 2


def test_too_many_of_them_stop_the_run_and_name_the_checkpoint(tmp_path):
    with pytest.raises(StoppedError, match=r"non-finite log-prob"):
        fit(tmp_path, callbacks=[poison(8)], guard={"max_nonfinite_fraction": 0.0})
    assert events(tmp_path)[-1] == "stopped"


def test_a_bad_gradient_is_vetoed_and_the_next_step_taken(tmp_path):
    _, module, _ = fit(tmp_path, callbacks=[PoisonGradient(1)], trainer={"max_epochs": 1})
    assert torch.equal(parameters_of(module), start(tmp_path))
    _, module, _ = fit(tmp_path / "two", callbacks=[PoisonGradient(1)], trainer={"max_epochs": 2})
    assert torch.isfinite(parameters_of(module)).all()
    assert not torch.equal(parameters_of(module), start(tmp_path / "two"))


@pytest.mark.parametrize("scaler", [False, True])
def test_patience_ends_a_run_that_does_not_recover(tmp_path, scaler):
    options = scaled(1.0)[0] if scaler else {}
    with pytest.raises(StoppedError, match="gradient was not finite"):
        fit(tmp_path, callbacks=[PoisonGradient(9)], trainer={"max_epochs": 5, **options}, guard={"patience": 2})
    assert events(tmp_path) == ["nonfinite_gradient", "nonfinite_gradient", "stopped"]


@pytest.mark.parametrize(
    ("kl", "ess", "warned"), [(0.004, 0.99, False), (0.03, 0.94, False), (0.5, 0.9, True), (0.02, 0.45, True)]
)
def test_a_mismatch_that_is_far_out_before_any_update_is_told_once(tmp_path, kl, ess, warned):
    trainer, module, _ = build(tmp_path)
    module.iteration.row = {"mismatch/kl_k3": kl, "mismatch/ess_ratio": ess}
    for _ in range(2):
        Guard().on_train_epoch_end(trainer, module)
        trainer.fit_loop.epoch_progress.current.completed += 1
    told = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [event["kind"] for event in told] == ["mismatch_at_start"] * warned
    for event in told:
        assert f"{kl:.3g} nats per token and an ESS ratio of {ess:.2f}" in event["message"]
        assert "add configs/correction/tis.yaml" in event["message"]


class VariedOnce(DigitReward):
    """Scores of its own in the first iteration, the same for all afterwards."""

    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        return super().__call__(samples) if self.calls == 1 else [1.0] * len(samples)


@pytest.mark.parametrize("penalty", [{}, {"kl_coefficient": 1.0}, {"entropy_coefficient": 1.0}])
def test_equal_rewards_leave_the_gradients_of_kl_and_entropy(tmp_path, penalty):
    ends = []
    for iterations in (1, 2):
        folder = tmp_path / str(iterations)
        options = {"task": DigitTask(reward=VariedOnce()), "objective": GRPO(**penalty)}
        if penalty:  # nothing but a gradient moves the weights; without one AdamW's moments would, if it stepped
            options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        _, module, _ = fit(folder, trainer={"max_epochs": iterations}, **options)
        ends.append(parameters_of(module))
    assert torch.equal(*ends) == (not penalty)
    assert events(tmp_path / "2") == ([] if penalty else ["no_signal"])


def test_a_kl_in_the_reward_has_no_gradient_of_its_own():
    assert GRPO(kl_coefficient=0.1).penalized
    assert not GRPO(kl_coefficient=0.1, kl_in="reward").penalized


def test_kl_ceiling_warns_or_stops(tmp_path):
    for action, ended in (("warn", nullcontext()), ("stop", pytest.raises(StoppedError, match="kl_ceiling"))):
        with ended:
            fit(tmp_path / action, callbacks=[shifted()], guard={"kl_ceiling": 0.5, "action": action})
    assert events(tmp_path / "warn") == ["mismatch"] * 2


class ShiftedAt(RLCallback):
    """Shifted in some iterations; notes the weights before and behind the updates of each, and the states then."""

    def __init__(self, *iterations):
        self.iterations, self.before, self.after, self.states = iterations, [], [], []

    def on_rollout_end(self, trainer, module, batch):
        self.before.append(parameters_of(module).clone())
        batch.sampler_logprobs += float(trainer.current_epoch in self.iterations)

    def on_train_epoch_end(self, trainer, pl_module):
        self.after.append(parameters_of(pl_module).clone())
        self.states.append(deepcopy(trainer.optimizers[0].state_dict()["state"]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_revert_takes_the_weights_of_the_last_iteration_within_the_limit(tmp_path, dtype):
    seen = ShiftedAt(2, 3)
    options = {
        "guard": {"kl_ceiling": 0.5, "action": "revert"},
        "trainer": {"max_epochs": 6},
        "policy": {"dtype": dtype},
    }
    fit(tmp_path, callbacks=[seen], **options)
    assert events(tmp_path) == ["mismatch"] * 2
    before, after = seen.before, seen.after
    # The rollout of iteration 2 shows that the updates of 1 went too far: 2 and 3 end where 1 began.
    assert not torch.equal(before[2], before[1])
    assert torch.equal(before[2], after[1])
    for end in (after[2], before[3], after[3], before[4]):
        assert torch.equal(end, before[1])
    assert not torch.equal(after[4], before[4])
    for kept in (2, 3):  # with the moments of the one step before
        for one, other in zip(seen.states[kept].values(), seen.states[0].values(), strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)
    rows = csv_rows(tmp_path / "run" / "metrics.csv")
    assert [row["guard/reverted"] for row in rows] == ["", "", "1.0", "1.0", "", ""]


@pytest.mark.parametrize("objective", ["decoupled", "bypass", "policy_gradient"])
@pytest.mark.parametrize("limit", [{"kl_ceiling": 0.5}, {"ess_floor": 0.99}])
def test_a_limit_is_measured_without_any_correction(tmp_path, objective, limit):
    shift = shifted() if "kl_ceiling" in limit else unlikely(-5.0)
    options = {"callbacks": [shift], "objective": GRPO(scale="none", old_logprobs=objective)}
    _, module, _ = fit(tmp_path, guard={**limit, "action": "skip"}, trainer={"max_epochs": 1}, **options)
    assert events(tmp_path) == ["mismatch"]
    assert torch.equal(parameters_of(module), start(tmp_path))


def scaled(scale, factor=0.5):
    """Return the Trainer's options for `16-mixed` with a loss scaler, which Lightning gives to CUDA alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=factor)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}, scaler


def test_overflows_of_a_loss_scaler_are_its_own_business(tmp_path):
    options, scaler = scaled(2.0**124, 2.0**-16)
    _, module, _ = fit(tmp_path, trainer={"max_epochs": 9, **options}, guard={"patience": 2})
    overflows = [bool(row["guard/overflowed_steps"]) for row in csv_rows(tmp_path / "run" / "metrics.csv")]
    assert sum(overflows) > 2
    assert not overflows[-1]
    assert scaler.get_scale() > 1
    assert events(tmp_path) == []
    moved = parameters_of(module)
    assert torch.isfinite(moved).all()
    assert not torch.equal(moved, start(tmp_path))


@pytest.mark.parametrize("upper", [float("inf"), 2.0])
def test_untruncated_weights_beyond_all_measure_are_rejected_and_logged(tmp_path, upper):
    callbacks = [unlikely(), TruncatedIS(upper=upper)]
    _, module, _ = fit(tmp_path, callbacks=callbacks, trainer={"max_epochs": 1})
    assert torch.isfinite(parameters_of(module)).all()
    assert events(tmp_path).count("extreme_weights") == (upper == float("inf"))


def test_an_epoch_end_without_an_iteration_counts_as_none():
    guard, module = Guard(), SimpleNamespace(iteration=IterationState())  # a resumed run may repeat one
    guard.on_train_epoch_end(None, module)


def test_a_configuration_and_a_checkpoint_of_before_are_read():
    guard = Guard(loss_odds=0.5)
    guard.load_state_dict({"vetoed": 1, "skipped": 2, "vetoed_in_a_row": 0, "first_rows": [{"reward/mean": 0.5}]})
    assert guard.skipped == 2
