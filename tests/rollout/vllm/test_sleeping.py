"""What sleeps and wakes: nothing on a CPU, and memory that comes back with arbitrary contents."""

import pytest
import torch

from tests.vllm_engines import prompts, publish, tiny_network

pytestmark = pytest.mark.vllm


def test_pages_that_woke_with_arbitrary_contents_are_cleared_before_anything_is_drawn(monkeypatch, built):
    """With a sampler that stays for several iterations no publish follows the wake that would."""
    network = tiny_network()
    engine = built(network)
    publish(network, engine, None, 0)
    expected = engine.generate(prompts(), 2, seed=1)
    engine.sleep()
    assert not engine._asleep  # there is no memory to give back
    engine.wake()
    for page in engine.llm.collective_rpc("pages")[0]:
        page.fill_(float("nan"))
    engine._asleep = True
    monkeypatch.setattr(engine.llm, "wake_up", lambda: None)
    engine.wake()
    drawn = engine.generate(prompts(), 2, seed=1)
    assert [one.token_ids for one in drawn] == [one.token_ids for one in expected]
    assert all(torch.tensor(one.logprobs).isfinite().all() for one in drawn)
