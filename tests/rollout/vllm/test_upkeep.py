"""What is done around a reload and at the end of an engine; whole engines: tests/rollout/test_vllm_known_faults.py."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm import upkeep
from lit_qrl.rollout.vllm.patches import CUMEM
from lit_qrl.rollout.vllm.upkeep import forget_graph_pool, forget_kernels, pack_again, without_adapters


def test_lora_wrappers_are_out_of_the_way_inside_and_back_after():
    class LinearWithLoRA(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = torch.nn.Linear(2, 2)
            self.lora_a_stacked = ()

    model = torch.nn.Sequential(LinearWithLoRA(), torch.nn.Linear(2, 2))
    wrapper = model[0]
    with without_adapters(model):
        assert model[0] is wrapper.base_layer
        assert {name for name, _ in model.named_parameters()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert model[0] is wrapper


class RoutedExperts(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.quant_method = SimpleNamespace(moe_kernel=kernel)


def test_kernels_of_experts_are_forgotten_and_no_others():
    other = torch.nn.Linear(2, 2)
    other.quant_method = SimpleNamespace(moe_kernel="kept")
    model = torch.nn.Sequential(RoutedExperts("old"), RoutedExperts(None), other)
    forget_kernels(model)
    assert [layer.quant_method.moe_kernel for layer in model] == [None, None, "kept"]


def test_only_a_head_that_holds_a_packed_copy_is_packed_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    packed, head = [], torch.nn.Embedding(2, 2)
    head.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)
    pack_again(head)
    assert packed == []
    head.cpu_linear = object()
    pack_again(head)
    assert packed == [head]


class Pool:
    pass


class Allocator:
    instance = None

    def __init__(self, listed):
        pair = (Pool(), Pool())
        self.allocator_and_pools = {"weights": [pair] if listed else pair}

    def release_pools(self):
        self.allocator_and_pools.clear()


@pytest.mark.parametrize("listed", [False, True], ids=["0.26", "0.32"])
def test_pools_outlive_the_worker_and_their_allocator_everything(listed, fake, monkeypatch):
    cumem = fake(CUMEM, CuMemAllocator=Allocator)
    monkeypatch.setattr(upkeep, "_pluggable", kept := [])
    monkeypatch.setattr(upkeep, "workspaces", lock := {"device": torch.ones(2)})
    assert not upkeep.hold_pools()  # no engine ever slept
    allocator = Allocator(listed)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    held = allocator.allocator_and_pools["weights"]
    pool, pluggable = (weakref.ref(one) for one in (held[0] if listed else held))
    del held
    upkeep.unlock_workspaces()
    assert not lock["device"].any()
    assert upkeep.hold_pools()
    assert not lock  # it lies in the pools
    allocator.release_pools()  # as vLLM's worker does when it is shut down
    assert pool() is not None
    upkeep.release_pools()
    assert pool() is None
    assert kept == [pluggable()]
    assert not upkeep.hold_pools()


@pytest.mark.vllm
def test_the_next_engine_captures_into_a_pool_of_its_own(monkeypatch):
    from vllm.platforms import current_platform

    platform = type(current_platform)
    monkeypatch.setattr(platform, "_global_graph_pool", (0, 7), raising=False)
    assert current_platform.get_global_graph_pool() == (0, 7)
    forget_graph_pool()
    monkeypatch.setattr(platform, "graph_pool_handle", lambda self: (0, 8), raising=False)
    assert current_platform.get_global_graph_pool() == (0, 8)
