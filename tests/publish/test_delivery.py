"""What a delivery compares, against an engine whose answers are written down."""

import gc
from contextlib import contextmanager

import pytest
import torch

from lit_qrl.publish.delivery import Delivery
from lit_qrl.receipts.ledger import PublishError, PublishReport, ReceivedLedger
from lit_qrl.rollout.engine import RolloutEngine

NAMES = [f"layers.{i}.up_proj.weight" for i in range(8)]
SHAPES = {name.removesuffix(".weight"): (2, 8) for name in NAMES}


class Keeps(RolloutEngine):
    """Holds what it was sent, but for names in `stale`; says nothing beyond the ledger."""

    def __init__(self, stale=()):
        self.held, self.stale = {}, stale

    def _take(self, tensors, version):
        received = ReceivedLedger(version)
        for name, tensor in tensors:
            if name not in self.held or name not in self.stale:
                self.held[name] = tensor.clone()
            received.record(name, self.held[name])
        return PublishReport(version=version, seconds=0.0, bytes=received.bytes, layers={}, received=received)

    setup = generate = None

    def load_weights(self, tensors, format, version):
        return self._take(tensors, version)

    def load_adapter(self, tensors, version):
        return self._take(tensors, version)

    perturb = load_adapter


class Answers(Keeps):
    """Can be read, and asked for columns; `wrong` is added to both."""

    wrong = 0.0

    def __init__(self):
        super().__init__()
        self.asked, self.read = [], []

    def read_columns(self, layer, columns):
        self.asked.append(layer)
        return self.held[f"{layer}.weight"][:, columns]

    def read_back(self, name):
        self.read.append(name)
        return self.held[name] + self.wrong


def delivery_to(engine):
    phases = []

    @contextmanager
    def timed(phase):
        phases.append(phase)
        yield

    return Delivery(engine, timed), phases


def stream(seed=0, names=NAMES):
    generator = torch.Generator().manual_seed(seed)
    return iter([(name, torch.randn(2, 8, generator=generator)) for name in names])


def test_an_engine_is_asked_only_for_what_it_can_do():
    delivery, phases = delivery_to(Keeps())
    assert delivery.weights(stream(), None, SHAPES, 0).bytes == 8 * 16 * 4
    assert phases == ["verify"]


def test_columns_of_four_layers_in_turn_and_four_tensors_are_looked_at():
    engine = Answers()
    delivery, _ = delivery_to(engine)
    for version in (0, 1):
        delivery.weights(stream(version), None, SHAPES, version)
    assert sorted(engine.asked) == sorted(SHAPES)
    assert engine.read == NAMES[::2] * 2
    engine.wrong = 1.0
    with pytest.raises(PublishError, match=f"read_back: {NAMES[0]}"):
        delivery.weights(stream(2), None, SHAPES, 2)


def test_the_last_receipts_of_the_same_kind_tell_stale_from_different():
    engine = Keeps(stale=NAMES[:1])
    delivery, _ = delivery_to(engine)
    delivery.weights(stream(0), None, {}, 0)
    with pytest.raises(PublishError, match=f"stale: {NAMES[0]}"):
        delivery.weights(stream(1), None, {}, 1)
    with pytest.raises(PublishError, match=f"different: {NAMES[0]}"):  # a failed publish leaves no receipts
        delivery.weights(stream(2), None, {}, 2)
    for kind in ("adapter", "norms"):
        fresh, _ = delivery_to(Keeps(stale=NAMES[:1]))
        fresh.part(kind, stream(0), 0)
        with pytest.raises(PublishError, match=f"stale: {NAMES[0]}"):
            fresh.part(kind, stream(1), 1)


def test_seconds_of_making_are_told_from_the_engines_own_and_from_those_that_it_reports():
    class Apart(Keeps):
        def load_weights(self, tensors, format, version):
            report = super().load_weights(tensors, format, version)
            report.parts = {"send": 2.0, "engine_load": 3.0}
            return report

    here = delivery_to(Keeps())[0].weights(stream(), None, SHAPES, 0).parts
    assert here.keys() == {"make", "load", "compare"}
    apart = delivery_to(Apart())[0].weights(stream(), None, SHAPES, 0).parts
    assert (apart.keys(), apart["send"], apart["engine_load"]) == ({"make", "send", "engine_load", "compare"}, 2.0, 3.0)
    assert here["make"] > 0 < apart["make"]


def test_no_garbage_is_looked_for_while_receipts_are_made_and_compared():
    seen = []

    class Watched(Keeps):
        def load_weights(self, tensors, format, version):
            seen.append(gc.isenabled())
            return super().load_weights(tensors, format, version)

        def read_back(self, name):
            seen.append(gc.isenabled())
            return self.held[name]

    delivery_to(Watched())[0].weights(stream(), None, {}, 0)
    assert seen == [False] * 5
    assert gc.isenabled()


def test_an_engine_that_keeps_no_record_is_believed():
    engine = Keeps()
    engine.load_weights = lambda tensors, format, version: PublishReport(
        version=version, seconds=0.0, bytes=len(list(tensors)), layers={}
    )
    delivery, phases = delivery_to(engine)
    assert delivery.weights(stream(), None, SHAPES, 0).bytes == len(NAMES)
    assert phases == []
