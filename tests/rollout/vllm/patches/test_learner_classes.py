"""A class that vLLM changed still makes the learner's models; whole engines: tests/families."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.families.configs import BY_TYPE, random_network
from tests.families.vllm_cells import eager_network, publish, start

pytestmark = pytest.mark.vllm


def test_the_learner_computes_as_before_after_vllm_took_its_class():
    network, ids = eager_network(BY_TYPE["olmo2"], 0), torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = network(input_ids=ids, use_cache=False).logits
    engine = start(network, None)
    try:
        publish(network, engine, 0)
        theirs = [one for one in engine.live.model.modules() if isinstance(one, PreTrainedModel)]
        assert type(network.model) in {type(one) for one in theirs}
        with torch.no_grad():
            assert torch.equal(network(input_ids=ids, use_cache=False).logits, expected)
            later = random_network(BY_TYPE["olmo2"])  # built when the class was changed
            later.set_attn_implementation("eager")
            assert torch.equal(later(input_ids=ids, use_cache=False).logits, expected)
    finally:
        engine.close()
