from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import AQNNoise, RLCallback
from lit_qrl.errors import ConfigError
from lit_qrl.loop.state import IterationState
from lit_qrl.types import no_all_reduce
from tests.families import configs as families
from tests.tables import csv_rows
from tests.tiny_run import build, fit


class Norms(RLCallback):
    """Keeps what the engine got and what the learner holds."""

    def __init__(self):
        self.sent = []
        self.learner = []

    def on_rollout_end(self, trainer, module, batch):
        name = "model.layers.0.input_layernorm.weight"
        self.sent.append(module.data.engine.read_back(name).clone())
        self.learner.append(module.policy.network.get_parameter(name).detach().clone())


def run(folder, iterations=4, **options):
    norms = Norms()
    noise = AQNNoise(**{"start": 0.1, "end": 0.01, "num_stages": 2, **options})
    fit(folder, callbacks=[noise, norms], trainer={"max_epochs": iterations})
    return norms


def test_stage_zero_is_silent_then_noise_is_fresh_and_never_accumulates(tmp_path):
    norms = run(tmp_path, iterations=6, num_stages=3)
    differences = [sent - clean for sent, clean in zip(norms.sent, norms.learner, strict=True)]
    assert [bool(d.any()) for d in differences] == [False, False, True, True, True, True]
    assert not torch.equal(differences[2], differences[3])
    # σ is 0.1 in stage 1 and 0.01 in stage 2; an accumulated draw would be larger.
    assert 0.05 < float(differences[3].std()) < 0.2
    assert 0.005 < float(differences[5].std()) < 0.02


def test_the_draw_depends_on_the_seed_and_the_iteration_alone(tmp_path):
    first, again = run(tmp_path / "a"), run(tmp_path / "b")
    assert torch.equal(first.sent[3] - first.learner[3], again.sent[3] - again.learner[3])
    other = run(tmp_path / "c", seed=7)
    assert not torch.equal(first.sent[3] - first.learner[3], other.sent[3] - other.learner[3])


class Entropies(Norms):
    """Scores what was drawn once more, with the norms that the engine holds, by the library's own forward pass."""

    def __init__(self):
        super().__init__()
        self.entropy, self.moves = [], []

    def on_rollout_end(self, trainer, module, batch):
        noisy, moves = deepcopy(module.policy.network).eval(), []
        for name, parameter in noisy.named_parameters():
            if "input_layernorm" in name or "post_attention" in name:
                sent = module.data.engine.read_back(name)
                moves.append((sent.double() - parameter.detach().double()).flatten())
                parameter.data.copy_(sent)
        entropies = []
        for row in range(3):
            start = batch.tokens.shape[1] - batch.mask.shape[1]
            tokens = batch.tokens[row, start - int(batch.prompt_length[row]) :]
            with torch.no_grad():
                logits = noisy(input_ids=tokens[None]).logits[0].double() / module.data.temperature
            drawn = logits[int(batch.prompt_length[row]) - 1 : -1][batch.mask[row]]
            entropies.append(torch.special.entr(drawn.softmax(-1)).sum(-1))
        self.entropy.append(float(torch.cat(entropies).mean()))
        self.moves.append(torch.cat(moves))


def test_noise_is_counted_in_the_samplers_log_probs_and_told_with_its_entropy(tmp_path):
    reference = Entropies()
    noise = AQNNoise(start=0.5, end=0.5, num_stages=2, entropy_sequences=3)
    fit(tmp_path, callbacks=[noise, reference], trainer={"max_epochs": 2})
    silent, noisy = csv_rows(tmp_path / "run" / "metrics.csv")
    assert float(noisy["mismatch/abs_log_ratio"]) > 3 * float(silent["mismatch/abs_log_ratio"])
    # two layers, two norms before projections each
    assert [float(row["noise/perturbed_norms"]) for row in (silent, noisy)] == [0, 4]
    assert float(silent["noise/sampler_entropy"]) == float(silent["noise/learner_entropy"])
    assert float(noisy["noise/sampler_entropy"]) == pytest.approx(reference.entropy[1], abs=2e-5)
    assert float(noisy["noise/learner_entropy"]) != pytest.approx(reference.entropy[1], abs=1e-4)
    moves = reference.moves[1]
    assert float(noisy["noise/realized_sigma"]) == pytest.approx(float(moves.square().mean().sqrt()), rel=1e-5)
    assert float(noisy["noise/moved_weights"]) == pytest.approx(float((moves != 0).double().mean()))
    assert not silent["noise/realized_sigma"]


def test_small_noise_is_rounded_away_in_16_bits():
    """σ = 5e-4 at a weight of 1, where numbers of bf16 lie 4e-3 and 8e-3 apart: few move, and those farther."""
    noise, weight = AQNNoise(norms=["w"]), torch.ones(100_000, dtype=torch.bfloat16)
    noise.sigma = 5e-4
    noise.on_publish(None, None, "w", weight)
    metrics = IterationState().metrics
    noise.on_rollout_end(None, SimpleNamespace(iteration=SimpleNamespace(metrics=metrics)), None)
    logged = metrics.compute(no_all_reduce)
    assert logged["noise/moved_weights"] < 0.01
    assert logged["noise/realized_sigma"] < 1e-4


def test_a_run_of_fewer_iterations_than_stages_has_a_stage_for_each(tmp_path):
    fit(tmp_path, callbacks=[AQNNoise(start=1e-2, end=1e-4)], trainer={"max_epochs": 4})
    rows = csv_rows(tmp_path / "run" / "metrics.csv")
    sigmas = [float(row["noise/sigma"]) for row in rows if row["noise/sigma"]]
    assert sigmas == pytest.approx([0.0, 1e-2, 1e-3, 1e-4])


def test_a_model_whose_norms_stand_behind_attention_is_refused(tmp_path):
    families.model_folder(families.BY_TYPE["olmo2"], tmp_path / "model")
    trainer, module, data = build(tmp_path, callbacks=[AQNNoise(num_stages=2)])
    with pytest.raises(ConfigError, match="norms stand behind attention"):
        trainer.fit(module, datamodule=data)
