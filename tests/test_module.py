import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from lit_qrl import formats
from lit_qrl.callbacks import AIS, RLCallback, TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.loop.evaluation import BOUNDS
from lit_qrl.module import GRPOModule
from lit_qrl.network import padding_free
from lit_qrl.objective import DAPO, GRPO, GSPO, Distillation, DrGRPO
from lit_qrl.precision import QATAligned
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.types import Correction, no_all_reduce
from tests.tables import csv_rows
from tests.tiny_run import build, fit, parameters_of
from tests.two_processes import one_process


class FirstGradient(Callback):
    """Remembers the gradient of the first optimizer step."""

    gradient = None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.flatten() for p in pl_module.policy.parameters()])


def test_no_pass_of_a_step_asks_the_device_for_tokens(tmp_path, monkeypatch):
    """What the host must see to lay out micro-batches it sees before the first, so that passes queue up."""
    events, lay_out, train = [], padding_free.flatten, GRPOModule.training_step
    monkeypatch.setattr(padding_free, "flatten", lambda batch: events.append("laid out") or lay_out(batch))
    monkeypatch.setattr(GRPOModule, "training_step", lambda *args: events.append("pass") or train(*args))
    seen = first_gradient(tmp_path / "laid_out", data={"micro_batches": 4})
    assert events == [*["laid out"] * 4, *["pass"] * 4]
    monkeypatch.setattr("lit_qrl.loop.iteration.laid_out", lambda network, batch: batch)
    assert torch.equal(seen, first_gradient(tmp_path / "each", data={"micro_batches": 4}))


class Trace(RLCallback):
    """Writes down what happens, in order."""

    def __init__(self):
        self.events = []

    def on_rollout_start(self, trainer, module, version):
        self.events.append(f"publish {version}")

    def on_rollout_end(self, trainer, module, batch):
        assert set(batch.version.tolist()) == {int(self.events[-1].split()[1])}
        self.events.append("generate")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.events.append("update")

    def on_validation_start(self, trainer, pl_module):
        self.events.append("evaluate")


def first_gradient(folder, **options):
    seen = FirstGradient()
    callbacks = [*options.pop("callbacks", []), seen]
    fit(folder, callbacks=callbacks, **{**options, "trainer": {"max_epochs": 1, **options.get("trainer", {})}})
    return seen.gradient


def rows_of(folder):
    return csv_rows(folder / "run" / "metrics.csv")


@pytest.mark.parametrize("cut", [{"micro_batches": 2}, {"micro_batches": "auto", "max_tokens_per_micro_batch": 40}])
def test_events_come_in_the_order_publish_generate_update(tmp_path, cut):
    trace = Trace()
    data = {"mini_batches": 2, **cut}
    fit(tmp_path, callbacks=[trace], data=data, trainer={"max_epochs": 3})
    expected = [event for i in range(3) for event in (f"publish {i}", "generate", "update", "update")]
    assert trace.events == expected


SPLIT = [GRPO(scale="none"), DAPO(filter_zero_variance=False), DrGRPO(), GSPO()]
SPLIT += [GRPO(reduction=reduction, mask_truncated=True) for reduction in ("sequence_sum", "token_sum")]


@pytest.mark.parametrize("objective", SPLIT, ids=lambda one: f"{type(one).__name__}-{one.reduction}")
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(tmp_path, objective):
    splits = [1, 2, 8]
    gradients = [
        first_gradient(tmp_path / str(k), objective=objective, data={"micro_batches": k}, callbacks=[AIS()])
        for k in splits
    ]
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-5 * float(gradients[0].abs().max()))


def test_in_fp64_the_gradient_does_not_depend_on_the_split_to_twelve_digits(tmp_path, monkeypatch):
    """The library's norms compute in fp32 whatever the dtype, so here they get an fp64 form."""

    def norm(self, hidden):
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm)
    options = {"format": "fp32", "trainer": {"precision": "64-true"}}
    whole, *others = (
        first_gradient(tmp_path / str(k), data={"micro_batches": k}, callbacks=[AIS()], **options) for k in (1, 2, 8)
    )
    assert whole.dtype == torch.float64
    for gradient in others:
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))


def test_a_correction_of_ones_leaves_the_gradient_bit_for_bit(tmp_path):
    class Ones(RLCallback):
        def correct(self, trainer, module, context):
            return Correction(weights=torch.ones_like(context.log_ratio), keep=torch.ones_like(context.mask))

    # Both score learner_old on their own, so that the ratio comes from the same two forward passes.
    class Nothing(RLCallback):
        def correct(self, trainer, module, context):
            return None

    gradients = [first_gradient(tmp_path / str(i), callbacks=[c]) for i, c in enumerate((Ones(), Nothing()))]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("policy", "plugin"),
    [
        ({"dtype": "fp32"}, None),
        ({"dtype": "bf16"}, None),
        ({"gradient_checkpointing": True, "packing": "never"}, None),
        ({}, QATAligned(formats.get("int4_group", group_size=32))),
    ],
)
def test_with_a_batch_invariant_engine_learner_and_sampler_agree_to_the_last_bit(tmp_path, policy, plugin):
    fit(
        tmp_path,
        format="auto",
        policy=policy,
        engine=TransformersEngine(batch_invariant=True),
        trainer={"plugins": [plugin] if plugin else None},
        data={"mini_batches": 2, "micro_batches": 2},
    )
    rows = [row for row in rows_of(tmp_path) if row["mismatch/ratio_max"]]
    assert len(rows) == 2
    for row in rows:
        assert float(row["mismatch/ratio_max"]) == float(row["mismatch/ratio_min"]) == 1
        assert float(row["mismatch/abs_log_ratio"]) == 0
        assert float(row["update/grad_norm"]) > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_log_probs_stay_fp32_under_stock_precision(tmp_path, precision):
    class Look(RLCallback):
        dtypes = set()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.dtypes |= {batch.batch.sampler_logprobs.dtype, batch.batch.learner_old_logprobs.dtype}
            self.dtypes |= {batch.batch.advantages.dtype, batch.total.dtype}

    look = Look()
    options = {"data": {"micro_batches": 2}, "trainer": {"precision": precision, "max_epochs": 1}}
    fit(tmp_path, callbacks=[look, AIS()], **options)
    assert look.dtypes <= {torch.float32, torch.int64}
    assert torch.float32 in look.dtypes


def test_one_row_of_metrics_per_iteration(tmp_path):
    fit(tmp_path, callbacks=[AIS()], trainer={"max_epochs": 3})
    rows = [row for row in rows_of(tmp_path) if row["reward/mean"]]
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    for name in ("mismatch/kl_k3", "mismatch/ess_ratio", "correction/alpha", "update/entropy", "time/rollout"):
        assert all(float(row[name]) >= 0 for row in rows), name


def test_validate_alone_publishes_first(tmp_path):
    trainer, module, data = build(tmp_path, trainer={"limit_val_batches": 1.0})
    (result,) = trainer.validate(module, datamodule=data, verbose=False)
    accuracies = {f"val/{name}{bound}" for name in ("greedy_pass@1", "accuracy") for bound in BOUNDS}
    assert set(result) == accuracies | {"val/greedy_stopped", "val/stopped"}
    assert 0 <= result["val/accuracy_ci_low"] <= result["val/accuracy"] <= result["val/accuracy_ci_high"] <= 1


def test_fit_evaluates_before_the_first_iteration_without_disturbing_the_training(tmp_path):
    quiet, loud = tmp_path / "quiet", tmp_path / "loud"
    _, plain, _ = fit(quiet)
    _, watched, _ = fit(loud, trainer={"limit_val_batches": 1.0, "check_val_every_n_epoch": 1})
    accuracies = [row["val/accuracy"] for row in rows_of(loud) if row["val/accuracy"]]
    assert len(accuracies) == 3
    assert torch.equal(parameters_of(plain), parameters_of(watched))


def test_kl_to_the_reference_and_lora_train(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", lora_alpha=8)
    for name, policy in (("full", {}), ("lora", {"lora": lora})):
        objective = GRPO(scale="none", kl_coefficient=0.1)
        fit(tmp_path / name, objective=objective, policy=policy, data={"mini_batches": 2})
        kl = [float(row["update/reference_kl"]) for row in rows_of(tmp_path / name) if row["update/reference_kl"]]
        assert kl[-1] > 0, name


def test_a_low_bit_student_is_taught_by_the_plain_weights_that_it_began_with(tmp_path):
    found = {}
    for name in ("initial", "named"):
        policy = {"reference": str(tmp_path / name / "model")} if name == "named" else {}
        options = {"trainer": {"plugins": QATAligned("int3_channel"), "max_epochs": 6}, "lr": 3e-4}
        fit(tmp_path / name, format="auto", objective=Distillation(), policy=policy, **options)
        found[name] = [float(kl) for row in rows_of(tmp_path / name) if (kl := row["update/reference_kl"])]
    assert found["initial"] == found["named"]
    assert found["initial"][-1] < 0.8 * found["initial"][0]


class Scored(RLCallback):
    """Scores every rollout with the published learner, with and without the ids that tokens were drawn among."""

    def __init__(self):
        self.apart, self.whole = [], []

    def on_rollout_end(self, trainer, module, rollout):
        mask = rollout.mask
        for found, batch in ((self.apart, rollout), (self.whole, replace(rollout, kept=None))):
            difference = module.score(batch) - rollout.sampler_logprobs
            found.append(float((difference * mask).abs().max()))


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.7, "top_k": 8, "temperature": 1.5}])
def test_learner_and_sampler_agree_over_the_tokens_that_were_kept(tmp_path, truncation):
    scored = Scored()
    fit(tmp_path, callbacks=[TruncatedIS(), scored], format="auto", data={**truncation, "mini_batches": 2})
    assert len(scored.apart) == 2
    assert max(scored.apart) < 2e-6  # two units in the last place
    assert min(scored.whole) > 1e-2  # what the whole vocabulary would have said
    assert abs(float(rows_of(tmp_path)[0]["mismatch/kl_k3"])) < 1e-6


def test_what_nothing_compares_is_not_recorded(tmp_path):
    scored = Scored()
    fit(tmp_path, callbacks=[scored], data={"top_p": 0.9})
    assert scored.apart == scored.whole


class Forgetful(TransformersEngine):
    """Does not say among which ids a token was drawn."""

    records_kept = False


def test_an_engine_that_does_not_say_what_it_kept_is_refused(tmp_path):
    trainer, module, data = build(tmp_path, callbacks=[AIS()], data={"top_p": 0.9}, engine=Forgetful())
    with pytest.raises(ConfigError, match=r"full sampling distribution.*Forgetful does not say"):
        trainer.fit(module, datamodule=data)
    assert module.policy.model is None


def test_tokens_without_micro_batches_by_tokens_are_refused_before_a_model_is_loaded(tmp_path):
    trainer, module, loader = build(tmp_path, data={"max_tokens_per_micro_batch": 100})
    with pytest.raises(ConfigError, match=r"data\.micro_batches to 4"):
        trainer.fit(module, datamodule=loader)
    assert module.policy.model is None


class OwnBaseline(GRPO):
    def advantages(self, rewards, group_size, all_reduce=no_all_reduce):
        return rewards - 0.5


@pytest.mark.parametrize("objective", [GRPO(scale="whiten", baseline="none"), OwnBaseline()])
def test_without_a_baseline_of_groups_single_completions_are_trained_on(tmp_path, objective):
    options = {"group_size": 1, "prompts_per_iteration": 8}
    _, module, _ = fit(tmp_path, objective=objective, data=options, trainer={"max_epochs": 1})
    assert torch.isfinite(parameters_of(module)).all()


def test_every_validation_of_a_run_sees_the_same_problems_and_the_learners_weights(tmp_path):
    """A loader that copies rows once made later validations answer other prompts than they scored."""
    from lit_qrl import module as hooks

    seen = []
    answer = hooks.answer

    def watched(learner, share, stage):
        results, problems = answer(learner, share, stage), share.problems
        texts = [problem.prompt_text for problem in problems]
        policy = learner.policy
        assert [policy.decode(problem.prompt_ids) for problem in problems] == texts
        assert texts == [learner.data.task.prompt(problem.row) for problem in problems]
        completion, ids = results["sampled"].completions[0], problems[0].prompt_ids
        with torch.no_grad():
            logits = policy.network(input_ids=torch.tensor([ids + completion.token_ids])).logits[0]
        own = logits.float().log_softmax(-1)[len(ids) - 1 : -1]
        own = own.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(own, torch.tensor(completion.logprobs), atol=1e-4, rtol=0)
        seen.append(texts)
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "answer", watched)
        fit(tmp_path, trainer={"limit_val_batches": 1.0, "check_val_every_n_epoch": 1, "max_epochs": 4})
    assert len(seen) == 5
    assert all(texts == seen[0] for texts in seen)


def test_the_entropy_bonus_has_a_gradient_and_raises_the_entropy(tmp_path):
    gradients = [
        first_gradient(tmp_path / f"gradient-{c}", objective=GRPO(scale="none", entropy_coefficient=c))
        for c in (0.0, 0.5, 1.0)
    ]
    bonus = gradients[1] - gradients[0]
    assert bonus.norm() > 1e-3 * gradients[0].norm()
    torch.testing.assert_close(gradients[2] - gradients[0], 2 * bonus, rtol=1e-3, atol=1e-5)
    entropies = []
    for c in (0.0, 1.0):
        objective = GRPO(scale="none", entropy_coefficient=c)
        fit(tmp_path / f"run-{c}", objective=objective, trainer={"max_epochs": 6}, lr=1e-2)
        entropies.append(float(rows_of(tmp_path / f"run-{c}")[-1]["update/entropy"]))
    assert entropies[1] > entropies[0] + 0.01


def test_metrics_are_logged_as_those_of_all_ranks(tmp_path, recwarn):
    """Lightning advises to reduce what a strategy of several ranks logs, once for every metric."""
    with mock.patch.dict(os.environ), one_process(tmp_path):
        fit(tmp_path, trainer={"strategy": "ddp", "max_epochs": 1})
    assert [str(warning.message) for warning in recwarn if "sync_dist" in str(warning.message)] == []
    fit(tmp_path / "plain", trainer={"max_epochs": 1})
    (row,), (plain,) = ([row for row in rows_of(f) if row["reward/mean"]] for f in (tmp_path, tmp_path / "plain"))
    clocks = ("time/", "rollout/tokens_per", "publish/gigabytes")
    assert {name: row[name] for name in row if not name.startswith(clocks)} == {
        name: plain[name] for name in plain if not name.startswith(clocks)
    }
