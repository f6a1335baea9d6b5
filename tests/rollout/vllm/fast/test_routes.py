"""Routes of a whole engine: tests/rollout/test_vllm_routes.py."""

from types import SimpleNamespace

import pytest
import torch
from lit_qrl_vllm_fast.routes import RecordedRoutes, record

from lit_qrl.errors import ConfigError


def recorded(slots=16, block_size=4, layers=2, experts=6, chosen=2):
    return RecordedRoutes(slots, block_size, layers, experts, chosen)


def test_a_token_has_what_was_chosen_in_its_slot_whoever_computed_it():
    routes = recorded()
    first, second = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.tensor([[5, 0], [1, 2], [3, 4]])
    slots = torch.tensor([12, 13, 6])  # two in block 3, one in block 1
    for layer, chosen in enumerate((first, second)):
        routes.write(layer, slots, chosen)
    read = routes.read([3, 1], 8)
    assert torch.equal(read[:2], torch.stack([first, second], 1)[:2])
    assert torch.equal(read[6], torch.stack([first, second], 1)[2])
    assert (read[[2, 3, 4, 5, 7]] == 255).all()
    routes.forget()
    assert (routes.read([3, 1], 8) == 255).all()


def test_recording_binds_every_router_and_takes_the_group_with_the_whole_past(fake):
    class Full:
        block_size = 4

    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=2), layer_names=["window"]),
        SimpleNamespace(kv_cache_spec=Full(), layer_names=["whole"]),
    ]
    fake("vllm.v1.kv_cache_interface", FullAttentionSpec=Full)
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=5))
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=3),
        vllm_config=SimpleNamespace(model_config=config),
    )
    core = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))

    class Runner(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer_id, self.routed_experts, self.bound = layer, None, []
            self.router = SimpleNamespace(set_capture_fn=self.bound.append)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Runner(1), Runner(4))
    llm = SimpleNamespace(llm_engine=core)
    for layers, cut in (((1, 2, 4), groups), ((1, 4), groups[:1])):
        scheduler.kv_cache_config.kv_cache_groups = cut
        with pytest.raises(ConfigError, match=r"vLLM does not tell them of this model.*routers in layers 1, 4.*old"):
            record(llm, model, layers, experts=300, chosen=3)
    scheduler.kv_cache_config.kv_cache_groups = groups
    routes = record(llm, model, (1, 4), experts=300, chosen=3)
    assert routes.table.shape == (12, 5, 3)
    assert routes.table.dtype == torch.int16
    assert (routes.group, routes.layer) == (1, "whole")
    assert scheduler.lit_qrl_recorded_routes is routes
    assert [bound.args for runner in model[1:] for bound in runner.bound] == [(1,), (4,)]
