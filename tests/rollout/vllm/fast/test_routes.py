"""Routes of a whole engine: tests/rollout/test_vllm_routes.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lit_qrl_vllm_fast.routes import RecordedRoutes, handing_out, reading_first, record

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


def test_a_pass_without_a_place_in_the_cache_is_not_kept(fake):
    context = SimpleNamespace(slot_mapping={})
    fake("vllm.forward_context", get_forward_context=lambda: context)
    routes = recorded()
    routes.layer = "attention.0"
    routes.capture(0, torch.tensor([[1, 2]]))
    assert (routes.table == 255).all()
    context.slot_mapping = {"attention.0": torch.tensor([4, -1, -1])}  # a token, and padding
    routes.capture(1, torch.tensor([[1, 2], [3, 4]]))
    assert (routes.table != 255).nonzero().tolist() == [[4, 1, 0], [4, 1, 1]]


def test_choices_are_read_before_the_blocks_are_freed_and_leave_with_the_request_that_ends():
    routes = recorded(layers=1)
    routes.write(0, torch.arange(4, 8), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]]))
    order = []

    class Blocks:
        def get_block_ids(self, name):
            order.append(f"read {name}")
            return ([9], [1])

    scheduler = SimpleNamespace(kv_cache_manager=Blocks(), lit_qrl_recorded_routes=routes)
    routes.group = 1
    free = reading_first(lambda self, request, delay=False: order.append(f"freed {request.request_id} {delay}"))
    ended, going = (SimpleNamespace(request_id=name, routed_experts=None) for name in "ab")

    def step(self):
        free(self, SimpleNamespace(request_id="a", num_tokens=4), delay=True)
        free(self, SimpleNamespace(request_id="aborted", num_tokens=2))
        return {0: SimpleNamespace(outputs=[ended, going])}

    handing_out(step)(scheduler)
    assert order == ["read a", "freed a True", "read aborted", "freed aborted False"]
    assert isinstance(ended.routed_experts, np.ndarray)
    assert ended.routed_experts.tolist() == [[[0, 1]], [[1, 2]], [[2, 3]]]  # the last token is not computed
    assert going.routed_experts is None
    assert not routes.taken


def test_an_engine_that_does_not_record_is_left_alone():
    scheduler = SimpleNamespace()
    assert reading_first(lambda self, request: "freed")(scheduler, None) == "freed"
    assert handing_out(lambda self: {})(scheduler) == {}


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
