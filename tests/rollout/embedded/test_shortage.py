"""Memory that does not do for a batch: halves, the same completions, and an end that says what to change."""

import pytest
import torch

from lit_qrl.rollout.embedded.decode import Decoder
from lit_qrl.rollout.engine import EngineDiedError
from tests.networks import build_network
from tests.rollout.embedded.test_engine import PROMPTS, engine_of, publish


@pytest.fixture(scope="module")
def network():
    return build_network()


class Narrow:
    """Stands in for `Decoder.run`: memory does for so many rows at a time."""

    def __init__(self, rows, error=None):
        self.rows, self.error, self.tried = rows, error or torch.OutOfMemoryError("Tried to allocate 2.00 GiB."), []

    def __call__(self, run):
        def narrow(decoder, prompts, n, part, *args, **options):
            rows = len(part)
            self.tried.append(rows)
            if rows > self.rows:
                raise self.error
            return run(decoder, prompts, n, part, *args, **options)

        return narrow


@pytest.mark.parametrize("rows", [1, 5, 11])
def test_out_of_memory_halves_the_batch_and_draws_the_same(network, monkeypatch, caplog, rows):
    engine = engine_of(network)
    whole = engine.generate(PROMPTS, 6, seed=3)
    narrow = Narrow(rows)
    monkeypatch.setattr(Decoder, "run", narrow(Decoder.run))
    seen = []
    parts = engine.generate(PROMPTS, 6, seed=3, progress=lambda done, tokens: seen.append((done, tokens)))
    assert [one.token_ids for one in parts] == [one.token_ids for one in whole]
    assert [one.finish_reason for one in parts] == [one.finish_reason for one in whole]
    assert seen == sorted(seen)
    assert seen[-1] == (24, sum(len(one.token_ids) for one in whole))
    assert "Memory ran out while 24 sequences were decoded (2.00 GiB were asked for)" in caplog.text
    assert "going on with 12 at a time" in caplog.text
    narrow.tried.clear()
    engine.generate(PROMPTS, 6, seed=4)
    assert max(narrow.tried) <= rows  # what did not fit is not tried again
    engine.setup(engine.spec, engine.policy)
    publish(engine, network)
    engine.generate(PROMPTS, 6, seed=4)
    assert max(narrow.tried) == 24


def test_one_sequence_that_does_not_fit_is_a_death_with_a_remedy(network, monkeypatch):
    engine = engine_of(network)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes.")
    monkeypatch.setattr(Decoder, "run", Narrow(0, error)(Decoder.run))
    with pytest.raises(EngineDiedError, match=r"one sequence was decoded: 1\.00 GiB were asked for\. Lower data\.max_"):
        engine.generate(PROMPTS, 6, seed=3)
    monkeypatch.setattr(Decoder, "run", Narrow(0, RuntimeError("shapes differ"))(Decoder.run))
    with pytest.raises(RuntimeError, match="shapes differ"):
        engine.generate(PROMPTS, 6, seed=3)


def test_scoring_halves_its_batch_too(network, monkeypatch):
    engine = engine_of(network)
    sequences = [[3, 4, 5, 6], [7, 8, 9], [4, 4], [9, 8, 7, 6]]
    whole = engine.score(sequences)
    base, tried = engine.network.base_model, []
    forward = base.forward

    def narrow(input_ids, **options):
        tried.append(len(input_ids))
        if len(input_ids) > 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(base, "forward", narrow)
    for one, other in zip(engine.score(sequences), whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert tried == [4, 2, 1, 1, 1, 1]
