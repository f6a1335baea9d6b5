import types

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.rollout import DiffusionEngine, TransformersEngine
from lit_qrl.rollout.embedded.sampler import EmbeddedSampler
from lit_qrl.rollout.engine import SamplerSpec, TakesAdapter
from lit_qrl.types import SamplingParams
from tests.networks import build_denoiser, build_network

KINDS = [(TransformersEngine, build_network), (DiffusionEngine, build_denoiser)]


@pytest.mark.parametrize(("kind", "build"), KINDS)
def test_plain_weights_are_shared_and_a_change_is_noticed(kind, build):
    network, engine = build(), kind()
    assert isinstance(engine, EmbeddedSampler)
    assert isinstance(engine, TakesAdapter)
    with pytest.raises(RuntimeError, match="setup"):
        engine.load_weights(network.named_parameters(), None, 3)
    engine.setup(SamplerSpec(sampling=SamplingParams(max_tokens=32)), types.SimpleNamespace(network=network))
    with pytest.raises(RuntimeError, match=r"publish to it first.*default_callbacks"):
        _ = engine.network
    report = engine.load_weights(network.named_parameters(), None, 3)
    assert (engine.version, report.version) == (3, 3)
    name = "model.layers.0.mlp.up_proj.weight"
    assert engine.read_back(name).data_ptr() == network.get_parameter(name).data_ptr()
    with torch.no_grad():
        network.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match="shares the learner's weights"):
        engine.generate([[4, 5]], 1, 0)
    engine.close()
    assert engine.read_back(name) is None


@pytest.mark.parametrize("kind", [TransformersEngine, DiffusionEngine])
def test_a_batch_of_no_rows_is_refused(kind):
    with pytest.raises(ConfigError, match="max_batch"):
        kind(max_batch=0)
