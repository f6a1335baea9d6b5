"""What is done around a reload and at the end of an engine; whole engines: tests/rollout/test_vllm_known_faults.py."""

import weakref

import pytest
import torch

from lit_qrl.rollout.vllm import upkeep
from lit_qrl.rollout.vllm.patches import CUMEM
from lit_qrl.rollout.vllm.upkeep import forget_graph_pool


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
    upkeep.hold_pools()  # no engine ever slept
    allocator = Allocator(listed)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    held = allocator.allocator_and_pools["weights"]
    pool, pluggable = (weakref.ref(one) for one in (held[0] if listed else held))
    del held
    upkeep.unlock_workspaces()
    assert not lock["device"].any()
    upkeep.hold_pools()
    assert not lock  # it lies in the pools
    allocator.release_pools()  # as vLLM's worker does when it is shut down
    assert pool() is not None
    upkeep.release_pools()
    assert pool() is None
    assert kept == [pluggable()]


@pytest.mark.vllm
def test_the_next_engine_captures_into_a_pool_of_its_own(monkeypatch):
    from vllm.platforms import current_platform

    platform = type(current_platform)
    monkeypatch.setattr(platform, "_global_graph_pool", (0, 7), raising=False)
    assert current_platform.get_global_graph_pool() == (0, 7)
    forget_graph_pool()
    monkeypatch.setattr(platform, "graph_pool_handle", lambda self: (0, 8), raising=False)
    assert current_platform.get_global_graph_pool() == (0, 8)
