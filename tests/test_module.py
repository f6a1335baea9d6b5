import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from lit_qrl import formats
from lit_qrl.callbacks import AIS, RLCallback, TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.module import GRPOModule
from lit_qrl.network import padding_free
from lit_qrl.objective import DAPO, GRPO, GSPO, Distillation, DrGRPO
from lit_qrl.precision import QATAligned
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.types import Correction, no_all_reduce
from tests.tables import csv_rows
from tests.tiny_run import build, calling, fit, parameters_of
from tests.two_processes import one_process


def test_no_pass_of_a_step_asks_the_device_for_tokens(tmp_path, monkeypatch):
    """What the host must see to lay out micro-batches it sees before the first, so that passes queue up."""
    events, lay_out, train = [], padding_free.flatten, GRPOModule.training_step
    monkeypatch.setattr(padding_free, "flatten", lambda batch: events.append("laid out") or lay_out(batch))
    monkeypatch.setattr(GRPOModule, "training_step", lambda *args: events.append("pass") or train(*args))
    seen = first_gradient(tmp_path / "laid_out", data={"micro_batches": 4})
    assert events == [*["laid out"] * 4, *["pass"] * 4]
    monkeypatch.setattr("lit_qrl.loop.iteration.laid_out", lambda network, batch: batch)
    assert torch.equal(seen, first_gradient(tmp_path / "each", data={"micro_batches": 4}))


def first_gradient(folder, callbacks=(), trainer=(), **options):
    """Return the gradient of the first optimizer step."""
    seen = []

    def note(trainer, pl_module, optimizer):
        seen.append(torch.cat([p.grad.flatten() for p in pl_module.policy.parameters()]))

    noting = calling(on_before_optimizer_step=note)
    fit(folder, callbacks=[*callbacks, noting], trainer={"max_epochs": 1, **dict(trainer)}, **options)
    return seen[0]


def rows_of(folder):
    return csv_rows(folder / "run" / "metrics.csv")


@pytest.mark.parametrize("cut", [{"micro_batches": 2}, {"micro_batches": "auto", "max_tokens_per_micro_batch": 40}])
def test_events_come_in_the_order_publish_generate_update_and_make_one_row_per_iteration(tmp_path, cut):
    events = []

    def drawn(trainer, module, batch):
        assert set(batch.version.tolist()) == {int(events[-1].split()[1])}
        events.append("generate")

    def trained(trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            events.append("update")

    trace = calling(
        on_rollout_start=lambda trainer, module, version: events.append(f"publish {version}"),
        on_rollout_end=drawn,
        on_train_batch_end=trained,
    )
    fit(tmp_path, callbacks=[trace, AIS()], data={"mini_batches": 2, **cut}, trainer={"max_epochs": 3})
    assert events == [event for i in range(3) for event in (f"publish {i}", "generate", "update", "update")]
    rows = [row for row in rows_of(tmp_path) if row["reward/mean"]]
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    for name in ("mismatch/kl_k3", "mismatch/ess_ratio", "correction/alpha", "update/entropy", "time/rollout"):
        assert all(float(row[name]) >= 0 for row in rows), name


SPLIT = [GRPO(scale="none"), DAPO(filter_zero_variance=False), DrGRPO(), GSPO()]
SPLIT += [GRPO(reduction=reduction, mask_truncated=True) for reduction in ("sequence_sum", "token_sum")]


@pytest.mark.parametrize("objective", SPLIT, ids=lambda one: f"{type(one).__name__}-{one.reduction}")
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(tmp_path, monkeypatch, objective):
    """To twelve digits in fp64; the library's norms compute in fp32 whatever the dtype, so here they get their own."""

    def norm(self, hidden):
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm)
    options = {"objective": objective, "format": "fp32", "trainer": {"precision": "64-true"}}
    whole, *others = (
        first_gradient(tmp_path / str(k), data={"micro_batches": k}, callbacks=[AIS()], **options) for k in (1, 2, 8)
    )
    assert whole.dtype == torch.float64
    for gradient in others:
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))


def test_a_correction_of_ones_leaves_the_gradient_bit_for_bit(tmp_path):
    def ones(trainer, module, context):
        return Correction(weights=torch.ones_like(context.log_ratio), keep=torch.ones_like(context.mask))

    # Both score learner_old on their own, so that the ratio comes from the same two forward passes.
    corrections = enumerate((ones, lambda *given: None))
    assert torch.equal(*(first_gradient(tmp_path / str(i), [calling(correct=one)]) for i, one in corrections))


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
    dtypes = set()

    def look(trainer, pl_module, batch, batch_idx):
        made = batch.batch
        seen = (made.sampler_logprobs, made.learner_old_logprobs, made.advantages, batch.total)
        dtypes.update(one.dtype for one in seen)

    options = {"data": {"micro_batches": 2}, "trainer": {"precision": precision, "max_epochs": 1}}
    fit(tmp_path, callbacks=[calling(on_train_batch_start=look), AIS()], **options)
    assert dtypes <= {torch.float32, torch.int64}
    assert torch.float32 in dtypes


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
