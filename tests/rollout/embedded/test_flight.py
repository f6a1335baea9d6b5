"""Weights that come between two steps: each token is drawn by those that the engine says drew it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from lit_qrl.network.structure import cached
from lit_qrl.rollout.embedded.decode import InFlight
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.types import SamplingParams
from tests.networks import build_network
from tests.routes import build_mixture

SAMPLING = SamplingParams(max_tokens=14, ignore_stop=True)
PROMPTS = [[3, 4, 5], [6, 7], [8], [9, 10, 11, 12], [13, 14]]


def publish(engine, network, version=0):
    tensors = ((name, parameter.detach()) for name, parameter in network.named_parameters())
    engine.load_weights(engine.arranged(tensors), None, version)


def two_networks():
    old, new = build_network(), build_network()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return old.eval(), new.eval()


def set_up(network, in_flight, **options):
    engine = TransformersEngine(share="never", **options)
    engine.setup(SamplerSpec(sampling=SAMPLING, in_flight=in_flight), SimpleNamespace(network=network))
    publish(engine, network)
    return engine


def after(steps, change):
    """Call `change` once, between two steps of which so many have been taken."""
    seen = 0

    def between():
        nonlocal seen
        seen += 1
        if seen == steps:
            change()

    return between


@torch.no_grad()
def expected(prompt, completion, old, new, in_flight):
    """The log-probs of each token by the network that drew it, given the keys and values that it saw."""
    first = completion.versions.index(1)
    tokens = torch.tensor([[*prompt, *completion.token_ids]], device=old.device)
    seen = len(prompt) + first - 1  # the last token of the old weights is taken in by the new
    cache = DynamicCache()
    before = old(tokens[:, :seen], **cached(old, cache)).logits
    if in_flight == "recompute":
        behind = new(tokens).logits[:, seen:]
    else:
        behind = new(tokens[:, seen:], **cached(old, cache)).logits
    logits = torch.cat([before, behind], dim=1)[0, len(prompt) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].cpu()


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
@pytest.mark.parametrize("slots", [False, True], ids=["batches", "slots"])
def test_both_parts_of_a_completion_have_the_log_probs_of_their_own_weights(in_flight, slots):
    old, new = two_networks()
    engine = set_up(old, in_flight, cuda_graphs=slots, max_batch=6)
    engine.between_steps = after(2 if slots else 5, lambda: publish(engine, new, version=1))
    drawn = engine.generate(PROMPTS, 2, 7)
    crossed = [(i, one) for i, one in enumerate(drawn) if one.versions is not None]
    assert len(crossed) >= 6
    for i, one in crossed:
        assert sorted(one.versions) == one.versions
        assert (one.version, one.versions[-1]) == (0, 1)
        reference = expected(PROMPTS[i // 2], one, old, new, in_flight)
        assert torch.allclose(torch.tensor(one.logprobs), reference, atol=1e-5)
    # Those that began later are the new weights' alone.
    assert all(one.version == 1 for one in drawn if one.versions is None)


def test_what_it_draws_depends_on_when_the_weights_came_and_on_nothing_else():
    old, new = two_networks()
    engine = set_up(old, "keep")
    draws = []
    for steps in (5, 5, 6):
        publish(engine, old)
        engine.between_steps = after(steps, lambda: publish(engine, new, version=1))
        draws.append(engine.generate(PROMPTS, 2, 7))
    assert draws[0] == draws[1]
    assert [one.token_ids[:5] for one in draws[0]] == [one.token_ids[:5] for one in draws[2]]
    assert draws[0] != draws[2]


def test_weights_that_are_the_same_change_no_token():
    network = build_network()
    for in_flight in ("keep", "recompute"):
        engine = set_up(network, in_flight)
        alone = engine.generate(PROMPTS, 2, 7)
        assert all(one.versions is None for one in alone)
        engine.between_steps = after(4, lambda engine=engine: publish(engine, network, version=1))
        again = engine.generate(PROMPTS, 2, 7)
        assert [one.token_ids for one in again] == [one.token_ids for one in alone]
        assert {len(set(one.versions)) for one in again} == {2}


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_the_experts_of_every_token_are_known_when_weights_came_on_the_way(in_flight):
    network = build_mixture()
    engine = TransformersEngine(share="never")
    spec = SamplerSpec(sampling=SAMPLING, in_flight=in_flight, routes=True)
    engine.setup(spec, SimpleNamespace(network=network))
    publish(engine, network)
    alone = engine.generate(PROMPTS, 2, 7)
    engine.between_steps = after(4, lambda: publish(engine, network, version=1))
    crossed = engine.generate(PROMPTS, 2, 7)
    assert all(set(one.versions) == {0, 1} for one in crossed)
    assert all(torch.equal(one.routed_experts, two.routed_experts) for one, two in zip(crossed, alone, strict=True))


def test_without_a_word_of_it_no_weights_come_on_the_way():
    network = build_network()
    engine = set_up(network, "none")
    engine.between_steps = after(1, lambda: pytest.fail("asked"))
    assert engine.generate(PROMPTS, 1, 7)
    assert InFlight(engine, recompute=True).version == 0


@pytest.mark.gpu
@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_steps_that_were_recorded_are_not_replayed_with_the_old_weights(in_flight):
    old, new = (network.cuda() for network in two_networks())
    engine = set_up(old, in_flight, cuda_graphs=True)
    engine.between_steps = after(2, lambda: publish(engine, new, version=1))
    drawn = engine.generate(PROMPTS, 2, 7)
    crossed = [(i, one) for i, one in enumerate(drawn) if one.versions is not None]
    assert len(crossed) == len(drawn)
    for i, one in crossed:
        reference = expected(PROMPTS[i // 2], one, old, new, in_flight)
        assert torch.allclose(torch.tensor(one.logprobs), reference, atol=1e-3)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_under_the_learners_autocast_new_weights_are_published_outside_of_it_and_used(cuda_graphs):
    old, new = two_networks()
    engine = TransformersEngine(share="never", cuda_graphs=cuda_graphs)
    spec = SamplerSpec(sampling=SAMPLING, in_flight="keep", compute_dtype=torch.bfloat16)
    engine.setup(spec, SimpleNamespace(network=old))
    publish(engine, old)
    under = []

    def change():
        under.append(torch.is_autocast_enabled("cpu"))
        publish(engine, new, version=1)

    engine.between_steps = after(1, change)
    found = engine.generate(PROMPTS, 1, seed=0)
    assert under == [False]
    engine.between_steps = None
    publish(engine, old)
    assert [one.logprobs[:1] for one in engine.generate(PROMPTS, 1, seed=0)] == [one.logprobs[:1] for one in found]
    with torch.autocast("cpu", torch.bfloat16):
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert sorted(set(one.versions)) == [0, 1]
            reference = expected(prompt, one, old, new, "keep").float()
            assert torch.allclose(torch.tensor(one.logprobs), reference, atol=0.02)
