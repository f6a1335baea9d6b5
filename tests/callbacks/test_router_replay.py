from dataclasses import replace

import pytest
import torch

from lit_qrl.callbacks import AIS, RouterReplay, TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.module import GRPOModule
from lit_qrl.objective import GRPO
from lit_qrl.rollout.embedded.engine import TransformersEngine
from tests.loop.test_routing import choose_otherwise
from tests.rollout.test_engine import Smallest
from tests.routes import LAYERS, MOE
from tests.tables import csv_rows
from tests.tiny_run import build, fit, model_folder


class Watching(RLCallback):
    """Keeps what the learner said and took."""

    def __init__(self):
        self.rollout, self.forwards = None, []

    def on_rollout_end(self, trainer, module, batch):
        self.rollout = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.forwards.append((batch, pl_module.iteration.logprobs))


class OddEngine(TransformersEngine):
    """A sampler whose routers choose otherwise than the learner's would."""

    def load_weights(self, tensors, format, version):
        report = super().load_weights(tensors, format, version)
        choose_otherwise(self.network)
        return report


def trained(folder, *callbacks, engine=None, **options):
    model_folder(folder / "model", gain=2, **MOE)
    watching = Watching()
    options = {"format": "bf16", "trainer": {"max_epochs": 1}, **options}
    if engine is not None:  # the probe would rightly find that it is another model
        options["publisher"] = {"probe_every": 0}
    _, module, _ = fit(folder, callbacks=[*callbacks, watching], engine=engine, **options)
    return watching, csv_rows(folder / "run" / "metrics.csv")[-1], module


def column(row, name):
    return float(row[f"routing/{name}"])


@pytest.mark.parametrize("policy", [{}, {"gradient_checkpointing": True, "packing": "never"}])
def test_the_samplers_experts_are_taken_in_scoring_and_training(tmp_path, policy):
    watching, row, _ = trained(
        tmp_path,
        RouterReplay(compare_every=1),
        AIS(),
        engine=OddEngine(dtype="fp32"),
        format="auto",
        policy=policy,
        data={"mini_batches": 2, "micro_batches": 2},
    )
    batch = watching.rollout
    assert (batch.learner_old_logprobs - batch.sampler_logprobs).abs().max() < 2e-6
    parts, logprobs = zip(*watching.forwards[:2], strict=True)  # the first mini-batch, before any update
    for part, said in zip(parts, logprobs, strict=True):
        assert (said - part.batch.sampler_logprobs).abs().max() < 2e-6
    assert column(row, "replayed_kl_k3") < 1e-10 < 1e-3 < column(row, "free_kl_k3")
    assert column(row, "free_differing_tokens") > 0.5
    assert column(row, "differing_tokens") > 0.5
    assert {f"routing/differing_layer_{layer}" for layer in range(LAYERS)} <= row.keys()
    assert column(row, "megabytes") == pytest.approx(batch.routed_experts.numel() / 1e6)
    assert 1 <= column(row, "load_max") <= 4
    assert ("routing/shared_prompt_tokens" in row) == (not policy)  # padded batches share nothing
    assert policy or column(row, "shared_prompt_tokens") == 1


def test_without_replay_the_same_run_disagrees_and_nothing_is_recorded(tmp_path):
    options = {"engine": OddEngine(dtype="fp32"), "format": "auto", "data": {"micro_batches": 2}}
    watching, row, _ = trained(tmp_path, AIS(), **options)
    assert (watching.rollout.learner_old_logprobs - watching.rollout.sampler_logprobs).abs().max() > 0.01
    assert watching.rollout.routed_experts is None
    assert not [name for name in row if name.startswith("routing/")]


def test_later_updates_take_what_the_learner_took_when_it_was_scored(tmp_path):
    watching, row, _ = trained(tmp_path, RouterReplay("old"), data={"mini_batches": 2}, lr=0.1)
    routes = watching.rollout.routed_experts
    inputs = watching.rollout.mask.roll(-1, 1)
    inputs[:, -1] = False
    known = (routes != 255).flatten(2).all(2)
    assert torch.equal(known[:, -watching.rollout.mask.shape[1] :], inputs)  # the last token is not computed
    assert column(row, "differing_tokens") > 0  # after the first update the routers would choose others
    part, said = watching.forwards[0]
    old = watching.rollout.learner_old_logprobs[part.rows, : said.shape[1]]
    torch.testing.assert_close(said, old, atol=1e-5, rtol=0)
    part, said = watching.forwards[1]
    assert torch.equal(part.batch.routed_experts, watching.rollout.select(part.rows).routed_experts)
    assert (said - watching.rollout.learner_old_logprobs[part.rows, : said.shape[1]]).abs().max() > 1e-3


def test_a_reference_routes_for_itself(tmp_path):
    """The frozen copy of an untrained learner says what the free learner says, not what the replayed one does."""
    watching, _, module = trained(
        tmp_path,
        RouterReplay(),
        engine=OddEngine(dtype="fp32"),
        format="auto",
        objective=GRPO(scale="none", kl_coefficient=0.1),
        lr=0.0,
    )
    batch = watching.rollout
    with torch.no_grad():
        free = module.policy(replace(batch, routed_experts=None)).logprobs
    torch.testing.assert_close(batch.reference_logprobs, free, atol=1e-5, rtol=0)
    assert (batch.reference_logprobs - batch.sampler_logprobs).abs().max() > 0.01


def test_the_models_own_load_balance_loss_is_added_where_it_is_asked_for(tmp_path):
    _, row, _ = trained(tmp_path, objective=GRPO(scale="none", load_balance_coefficient=None))
    assert 1.9 < column(row, "balance_loss") < 8  # two of eight experts: 2 is even, 8 collapsed


@pytest.mark.parametrize(
    ("replays", "options", "said"),
    [
        ([RouterReplay()], {"engine": Smallest()}, "needs an engine that records which experts.*Given: Smallest"),
        ([RouterReplay("old")], {}, "there is one update for each rollout"),
        ([RouterReplay(), RouterReplay("old")], {"data": {"mini_batches": 2}}, "RouterReplay twice"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_any_weight_is_loaded(tmp_path, replays, options, said):
    model_folder(tmp_path / "model", **MOE)
    trainer, module, data = build(tmp_path, callbacks=replays, format="bf16", **options)
    with pytest.raises(ConfigError, match=said):
        trainer.fit(module, data)
    assert module.policy.model is None


def test_a_correction_without_scoring_sees_replayed_ratios(tmp_path):
    """With one update TruncatedIS takes the training forward's log-probs, which are replayed, too."""
    _, row, _ = trained(tmp_path, RouterReplay(), TruncatedIS(), engine=OddEngine(dtype="fp32"), format="auto")
    assert float(row["mismatch/abs_log_ratio"]) < 1e-6
    assert float(row["correction/truncated_tokens"]) == 0


def test_a_comparison_takes_as_many_passes_as_scoring_does_where_tokens_say_how_many(tmp_path, monkeypatch):
    taken, score = [], GRPOModule.score

    def counted(module, rollout, chunks=1, routes=None):
        taken.append(chunks)
        return score(module, rollout, chunks, routes)

    monkeypatch.setattr(GRPOModule, "score", counted)
    data = {"micro_batches": "auto", "max_tokens_per_micro_batch": 40}
    trained(tmp_path, RouterReplay(compare_every=1), AIS(), data=data)
    assert len(taken) == 2
    assert taken[0] == taken[1] > 1
