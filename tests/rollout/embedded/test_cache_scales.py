from functools import partial

import pytest
import torch
from transformers.cache_utils import DynamicCache

from lit_qrl.errors import ConfigError
from lit_qrl.network.structure import cached
from lit_qrl.rollout.embedded.cache import MARGIN, rounded
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.types import SamplingParams
from tests.networks import build_network
from tests.rollout.embedded.test_engine import PROMPTS, publish, scored_apart
from tests.rollout.embedded.test_engine import engine_of as plain_engine

SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(1,))


@pytest.fixture
def network():
    network = build_network()
    with torch.no_grad():  # so that attention says something
        for layer in network.model.layers:
            layer.self_attn.v_proj.weight.mul_(8)
    return network


engine_of = partial(plain_engine, sampling=SAMPLING, kv_cache_dtype="fp8", share="never")


class Cast(DynamicCache):
    """Rounds by torch's own cast, at scales of the largest numbers that prompts alone have."""

    def __init__(self, largest=None):
        super().__init__()
        self.largest = largest

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.largest is not None:
            states = []
            for part, largest in zip((key_states, value_states), self.largest[layer_idx], strict=True):
                scale = largest * MARGIN / 448
                states.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
            key_states, value_states = states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def largest_of(network, prompts):
    found = torch.zeros(len(network.model.layers), 2)
    for prompt in prompts:
        cache = Cast()
        network(torch.tensor([prompt]), **cached(network, cache))
        now = torch.tensor([[layer.keys.abs().max(), layer.values.abs().max()] for layer in cache.layers])
        found = torch.maximum(found, now)
    return found


@torch.no_grad()
def expected(network, sequence, largest):
    logits = network(torch.tensor([sequence]), **cached(network, Cast(largest))).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]


def test_numbers_are_rounded_as_a_cast_rounds_them_and_saturate():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 700, 4, generator=generator) * torch.logspace(-6, 3, 4)
    for numbers, scale in ((keys, 0.25), (values, 3.0)):
        found, cast = rounded(numbers, torch.tensor(scale)), (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        torch.testing.assert_close(found, cast.float() * scale, rtol=0, atol=0)
    assert found.abs().max() == 448 * 3.0
    assert rounded(keys.bfloat16(), torch.tensor(1.0)).dtype == torch.bfloat16


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["batches", "slots"])
def test_rollouts_are_drawn_over_rounded_keys_and_values_and_evaluations_are_not(network, cuda_graphs):
    engine, plain = engine_of(network, cuda_graphs=cuda_graphs), engine_of(network)
    plain.kv_cache_dtype, plain._scales = "auto", None
    largest = largest_of(network, PROMPTS)
    drawn = engine.generate(PROMPTS, 3, seed=1)
    gaps = []
    for index, completion in enumerate(drawn):
        prompt = PROMPTS[index // 3]
        for scales in (largest, None):
            wanted = expected(network, [*prompt, *completion.token_ids], scales)[len(prompt) - 1 :]
            gaps.append((torch.tensor(completion.logprobs) - wanted).abs().max().item())
    assert max(gaps[::2]) < 1e-5
    assert max(gaps[1::2]) > 1e-3
    # the engine's own scores of a first prompt and what follows are those of scales that hold them all
    tokens = [*PROMPTS[0], *drawn[0].token_ids]
    torch.testing.assert_close(engine.score([tokens])[0], expected(network, tokens, largest), atol=1e-5, rtol=0)
    evaluated, without = (one.generate(PROMPTS, 1, seed=2, sampling=SAMPLING) for one in (engine, plain))
    assert [one.token_ids for one in evaluated] == [one.token_ids for one in without]
    for one, other in zip(evaluated, without, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)


def test_scales_follow_the_weights_and_a_probe_leaves_none_behind(network):
    engine = engine_of(network)
    engine.score([[9, 9, 9, 2]])
    before = engine.generate(PROMPTS, 2, seed=3)
    torch.testing.assert_close(engine._scales, largest_of(network, PROMPTS) * MARGIN / 448)
    with torch.no_grad():  # the same function, with values that the old scales would round to nothing
        for layer in network.model.layers:
            layer.self_attn.v_proj.weight.mul_(2.0**-12)
            layer.self_attn.o_proj.weight.mul_(2.0**12)
    publish(engine, network, version=1)
    after = engine.generate(PROMPTS, 2, seed=3)
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert [one.logprobs for one in after] == [one.logprobs for one in before]
    kept = engine._scales
    engine.generate([[7]], 1, seed=0)
    assert engine._scales is kept
    name = next(name for name, one in network.named_parameters() if "norm" in name)
    engine.perturb(iter([(name, network.get_parameter(name).detach() * 2)]), 2)
    assert engine._scales is None


def test_what_cannot_be_beside_it_is_refused():
    with pytest.raises(ConfigError, match=r"beside data\.engine\.batch_invariant.*Leave one of the two out"):
        TransformersEngine(kv_cache_dtype="fp8", batch_invariant=True).validate(SamplerSpec())
    TransformersEngine(batch_invariant=True).validate(SamplerSpec())


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu_rollouts_are_drawn_over_rounded_keys_and_values(network, cuda_graphs):
    network = network.bfloat16().cuda()
    engine = engine_of(network, cuda_graphs=cuda_graphs)
    drawn = engine.generate(PROMPTS, 64, seed=1)
    assert not engine.trust.broken
    assert drawn == engine.generate(PROMPTS, 64, seed=1)
    apart = scored_apart(engine, drawn, 64)
    engine.kv_cache_dtype, engine._scales = "auto", None
    assert apart < min(0.1, scored_apart(engine, drawn, 64))
