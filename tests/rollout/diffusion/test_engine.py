import types

import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.loop.batching import assemble, concatenate
from lit_qrl.network.denoising import Estimator
from lit_qrl.receipts.ledger import Ledger, compare
from lit_qrl.rollout import DiffusionEngine
from lit_qrl.rollout.engine import Estimates, SamplerSpec, Scores
from lit_qrl.types import SamplingParams
from tests.network.test_denoising import estimated
from tests.networks import build_denoiser, build_network
from tests.rollout.embedded.test_engine import publish

PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 3, 12], [10, 11]]
EOS = 1
ESTIMATOR = Estimator(masks=2, prompt_masking=0.4)


@pytest.fixture(scope="module")
def network():
    return build_denoiser()


def engine_of(network, format=None, sampling=None, **options):
    engine = DiffusionEngine(**{"block": 4, **options})
    sampling = sampling or SamplingParams(max_tokens=8, stop_token_ids=(EOS,))
    engine.setup(SamplerSpec(sampling=sampling, estimator=ESTIMATOR), types.SimpleNamespace(network=network))
    publish(engine, network, format)
    return engine


def test_log_probs_are_estimates_under_the_completions_masks(network):
    completions = engine_of(network).generate(PROMPTS, 3, seed=0)
    assert len({tuple(one.token_ids) for one in completions}) > 6
    assert len({one.mask_seed for one in completions}) == 12
    for index, one in enumerate(completions):
        prompt = PROMPTS[index // 3]
        masks = ESTIMATOR.hidden([one.mask_seed], [len(prompt)], len(prompt))[:, 0].tolist()
        each = torch.tensor([estimated(network, prompt, one.token_ids, mask, length=8) for mask in masks])
        torch.testing.assert_close(torch.tensor(one.logprobs), each.mean(0), atol=1e-4, rtol=1e-4)
        assert one.drawn_over == 8
        assert len(one.unmasked_at) == len(one.token_ids)
        assert one.finish_reason == ("stop" if one.token_ids[-1] == EOS else "length")


def test_the_same_seed_gives_the_same_however_the_batch_is_cut(network):
    whole = engine_of(network).generate(PROMPTS, 3, seed=5)
    cut = engine_of(network, max_batch=2).generate(PROMPTS, 3, seed=5)
    later = engine_of(network).generate(PROMPTS[2:], 3, seed=5, positions=[2, 3])
    assert [one.token_ids for one in whole] == [one.token_ids for one in cut]
    assert [one.mask_seed for one in whole] == [one.mask_seed for one in cut]
    assert [one.token_ids for one in later] == [one.token_ids for one in whole[6:]]
    other = engine_of(network).generate(PROMPTS, 3, seed=6)
    assert [one.mask_seed for one in other] != [one.mask_seed for one in whole]


def test_a_batch_of_completions_is_estimated_again_to_the_same(network):
    engine = engine_of(network)
    assert isinstance(engine, Estimates)
    assert isinstance(engine, Scores)
    completions = engine.generate(PROMPTS, 2, seed=1)
    batch = assemble(PROMPTS, completions, 2, pad_token_id=0)
    torch.testing.assert_close(engine.estimate(batch), batch.sampler_logprobs)
    assert batch.unmasked_at.shape == batch.mask.shape
    assert ((batch.unmasked_at >= 0) == batch.mask).all()
    twice = concatenate([batch, batch], 0, 2)
    torch.testing.assert_close(engine.estimate(twice)[8:], batch.sampler_logprobs)
    batch.mask_seed += 1
    assert (engine.estimate(batch) - batch.sampler_logprobs).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["fp8_tensor", "int4_group", "nvfp4"])
def test_formats_are_published_with_receipts_and_differ(name):
    network = build_denoiser(hidden_size=128, intermediate_size=128, head_dim=32)
    format = formats.get(name, **({"group_size": 32} if name == "int4_group" else {}))
    engine, sent = engine_of(network), Ledger(0)

    def watched(stream):
        for tensor_name, tensor in stream:
            sent.record(tensor_name, tensor)
            yield tensor_name, tensor

    before = engine.generate(PROMPTS, 1, seed=0)
    report = publish(engine, network, format, change=watched)
    assert compare(sent, report.received) == []
    assert report.layers["model.layers.0.mlp.up_proj.weight"] == name
    batch = assemble(PROMPTS, before, 1, pad_token_id=0)
    gap = (engine.estimate(batch) - batch.sampler_logprobs)[batch.mask].abs()
    assert 1e-5 < float(gap.mean()) < 2.0


def test_memory_that_runs_out_halves_the_batch(network, monkeypatch):
    engine = engine_of(network)
    expected = engine.generate(PROMPTS, 4, seed=2)
    forward = type(engine.network.model).forward

    def narrow(self, input_ids, **kwargs):
        if len(input_ids) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(engine.network.model), "forward", narrow)
    assert [one.token_ids for one in engine.generate(PROMPTS, 4, seed=2)] == [one.token_ids for one in expected]


def test_bad_options_are_refused_with_a_remedy(network):
    with pytest.raises(ConfigError, match=r"steps does not divide.*1, 2, 4.*Set it to 2"):
        DiffusionEngine(block=4, steps=3)
    with pytest.raises(ConfigError, match="block is too small"):
        DiffusionEngine(block=0)
    engine = DiffusionEngine(block=32)
    with pytest.raises(ConfigError, match=r"max_completion_tokens is no multiple.*Set it to 128 or 96"):
        engine.validate(SamplerSpec(sampling=SamplingParams(max_tokens=100)))
    with pytest.raises(ConfigError, match=r"of an evaluation is no multiple.*Set it to 32,"):
        engine.validate(SamplerSpec(sampling=SamplingParams(max_tokens=64), evaluation_limits=(64, 20)))
    with pytest.raises(ConfigError, match=r"other blocks.*policy.block: 32"):
        engine.validate(SamplerSpec(estimator=Estimator(kind="blocks", block=16)))
    engine.validate(SamplerSpec(estimator=Estimator(kind="one_step", block=16)))
    with pytest.raises(ConfigError, match="causal"):
        engine.check_model(build_network())
    with pytest.raises(ConfigError, match="multiple"):
        engine_of(network).generate(PROMPTS, 1, 0, sampling=SamplingParams(max_tokens=7))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "fp8_tensor"])
def test_a_gpu_draws_and_estimates_as_the_learner_does(name):
    network = build_denoiser(hidden_size=128, intermediate_size=128, head_dim=32, dtype=torch.bfloat16).cuda()
    engine = engine_of(network, None if name is None else formats.get(name))
    completions = engine.generate(PROMPTS, 4, seed=0)
    again = engine.generate(PROMPTS, 4, seed=0)
    assert [one.token_ids for one in completions] == [one.token_ids for one in again]
    batch = assemble(PROMPTS, completions, 4, pad_token_id=0).to("cuda")
    learner = engine_of(network)
    gap = (learner.estimate(batch) - batch.sampler_logprobs)[batch.mask].abs().mean()
    assert float(gap) < (0.02 if name is None else 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "fp8_tensor", "fp8_row"])
@pytest.mark.parametrize(("temperature", "reuse"), [(0.0, "none"), (1.0, "none"), (1.0, "prompt"), (1.0, "blocks")])
@pytest.mark.parametrize("size", [128, 1024])
def test_a_graph_of_the_step_changes_nothing(name, temperature, reuse, size, caplog):
    network = build_denoiser(hidden_size=size, intermediate_size=size, head_dim=64, dtype=torch.bfloat16).cuda()
    sampling = SamplingParams(max_tokens=16, stop_token_ids=(EOS,), temperature=temperature)
    format = None if name is None else formats.get(name)
    options = {"block": 8, "reuse": reuse}
    plain, replayed = (engine_of(network, format, sampling, graphs=graphs, **options) for graphs in (False, True))
    for prompts in (PROMPTS, [[5, 6, 7]] * 3):  # of several lengths, and of one
        expected, found = (one.generate(prompts, 3, seed=0) for one in (plain, replayed))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.unmasked_at for one in found] == [one.unmasked_at for one in expected]
    assert replayed.graphs.checked
    assert not replayed.graphs.broken, caplog.text
