"""A part that was kept, or exchanged for another, between two publishes one optimizer step apart is named."""

import contextlib
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import merged_weights
from lit_qrl.precision.source import unchanged
from lit_qrl.publish.delivery import Delivery
from lit_qrl.publish.spec import source_of
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.embedded.loading import Modules
from lit_qrl.rollout.engine import SamplerSpec
from tests.families.configs import FAMILIES, random_network
from tests.families.page import kept as measured
from tests.vllm_engines import LEARNING_RATE

READ_AGAIN = {"read_back", "gemm"}
"""What looking into a few tensors once more finds, beside their receipts."""
DECODED = [family for family in FAMILIES if family.kind != "state"]


def connected(family, format):
    network = random_network(family)
    policy = SimpleNamespace(network=network, named_weights=lambda: merged_weights(network))
    engine = TransformersEngine(share="never")
    engine.setup(SamplerSpec(), policy)
    source = source_of(policy, None, None if format == "plain" else formats.get(format))
    return network, source, Delivery(engine, lambda phase: contextlib.nullcontext())


def publish(source, delivery, version):
    return delivery.weights(source.whole(unchanged, None), source.format, source.shapes, version)


@torch.no_grad()
def step(network, seed=0, dtype=torch.float32):
    """What one optimizer step changes, as far as an engine's dtype shows it: every number by the learning rate.

    A number of which that is less than half the spacing in bf16 would be sent as the same one, so that what stays
    behind is not stale; it goes to the next one here.
    """
    generator = torch.Generator().manual_seed(seed)
    for tensor in {id(tensor): tensor for tensor in network.state_dict(keep_vars=True).values()}.values():
        if tensor.is_floating_point():
            size = (torch.finfo(dtype).eps * tensor.abs()).clamp(min=LEARNING_RATE)
            tensor.add_(size * (2.0 * torch.randint(2, tensor.shape, generator=generator) - 1))


def one_of_each(names):
    """The last tensor of each kind: the names of its layers aside."""
    return set({name.rpartition("layers.")[2].partition(".")[2] or name: name for name in names}.values())


@pytest.mark.parametrize("format", ["plain", "fp8_row", "int4_group"])
@pytest.mark.parametrize("family", DECODED, ids=lambda family: family.model_type)
def test_every_kind_of_tensor_is_named_when_it_stays_behind(family, format, monkeypatch):
    try:
        network, source, delivery = connected(family, format)
    except ConfigError:
        column = f"fit/{'auto' if format == 'plain' else format}"
        assert measured(family)["transformers"][column]["state"] == "refused"
        return
    first = publish(source, delivery, 0)
    step(network)
    kept = {name.removesuffix(".weight") for name in one_of_each(first.layers)}
    plain, packed = Modules.set_plain, Modules.set_quantized
    monkeypatch.setattr(Modules, "set_plain", lambda self, name, tensor: _unless(kept, name, plain, self, tensor))
    monkeypatch.setattr(Modules, "set_quantized", lambda self, name, *rest: _unless(kept, name, packed, self, *rest))
    with pytest.raises(PublishError) as caught:
        publish(source, delivery, 1)
    named = {fault.name for fault in caught.value.faults}
    assert all(any(name == one or name.startswith(f"{one}.weight") for name in named) for one in kept)
    assert all(any(name == one or name.startswith(f"{one}.weight") for one in kept) for name in named)
    assert {fault.kind for fault in caught.value.faults} - READ_AGAIN == {"stale"}


def _unless(kept, name, then, modules, *arguments):
    if name.removesuffix(".weight") not in kept:
        then(modules, name, *arguments)


@pytest.mark.parametrize("family", DECODED, ids=lambda family: family.model_type)
def test_two_layers_that_were_exchanged_are_named(family, monkeypatch):
    network, source, delivery = connected(family, "plain")
    publish(source, delivery, 0)
    step(network)
    weights = dict(merged_weights(network))
    names = sorted(weights, key=lambda name: (weights[name].shape, name))
    alike = ((a, b) for a, b in pairwise(names) if weights[a].shape == weights[b].shape)
    one, other = next((a, b) for a, b in alike if weights[a].ndim > 1)
    swapped, plain = {one: weights[other], other: weights[one]}, Modules.set_plain
    monkeypatch.setattr(Modules, "set_plain", lambda self, name, t: plain(self, name, swapped.get(name, t).clone()))
    with pytest.raises(PublishError) as caught:
        publish(source, delivery, 1)
    named = {(fault.kind, fault.name) for fault in caught.value.faults if fault.kind not in READ_AGAIN}
    assert named == {("swapped", one), ("swapped", other)}
