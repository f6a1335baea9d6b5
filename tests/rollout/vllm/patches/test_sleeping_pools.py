"""What an engine that could sleep leaves behind, on an allocator that only holds pools."""

import sys
import weakref

import pytest

from lit_qrl.rollout.vllm.patches import sleeping_pools


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
    cumem = fake(sleeping_pools.MODULE, CuMemAllocator=Allocator)
    monkeypatch.setattr(sleeping_pools, "_pluggable", kept := [])
    assert not sleeping_pools.hold_pools()  # no engine ever slept
    allocator = Allocator(listed)
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    held = allocator.allocator_and_pools["weights"]
    pool, pluggable = (weakref.ref(one) for one in (held[0] if listed else held))
    del held
    assert sleeping_pools.hold_pools()
    allocator.release_pools()  # as vLLM's worker does when it is shut down
    assert pool() is not None
    sleeping_pools.release_pools()
    assert pool() is None
    assert kept == [pluggable()]
    assert not sleeping_pools.hold_pools()


def test_without_vllm_there_is_nothing_to_release(monkeypatch):
    monkeypatch.delitem(sys.modules, sleeping_pools.MODULE, raising=False)
    assert not sleeping_pools.hold_pools()
    sleeping_pools.release_pools()
