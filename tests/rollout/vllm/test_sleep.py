"""What a sleeping engine leaves behind, on an allocator that only counts."""

import sys
import weakref
from types import SimpleNamespace

import pytest

from lit_qrl.rollout.vllm import sleep as vllm_sleep


class Pool:
    pass


class Allocator:
    instance = None

    def __init__(self):
        self.pointer_to_data, self.story = {}, []
        self.python_free_callback = self._python_free_callback
        self.allocator_and_pools = {"weights": (Pool(), Pool())}

    def _python_free_callback(self, pointer):
        self.story.append(("unmap", pointer))
        return self.pointer_to_data.pop(pointer).handle

    def release_pools(self):
        self.allocator_and_pools.clear()


@pytest.fixture
def cumem(monkeypatch):
    class Fresh(Allocator):
        pass

    # a fresh class: the patch is of the class
    Fresh._python_free_callback = lambda self, pointer: Allocator._python_free_callback(self, pointer)
    module = SimpleNamespace(CuMemAllocator=Fresh, mapped=[])
    module.create_and_map = lambda handle: module.mapped.append(handle)
    monkeypatch.setitem(sys.modules, vllm_sleep._MODULE, module)
    return module


def test_what_slept_is_mapped_for_the_moment_in_which_it_is_freed(cumem):
    vllm_sleep.map_before_freeing()
    vllm_sleep.map_before_freeing()  # a second engine
    allocator = cumem.CuMemAllocator()
    for pointer, asleep in ((1, True), (2, False)):
        allocator.pointer_to_data[pointer] = SimpleNamespace(handle=f"handle {pointer}", is_asleep=asleep)
    assert allocator.python_free_callback(1) == "handle 1"
    assert cumem.mapped == ["handle 1"]
    assert allocator.python_free_callback(2) == "handle 2"
    assert cumem.mapped == ["handle 1"]
    assert allocator.story == [("unmap", 1), ("unmap", 2)]
    assert not allocator.pointer_to_data


def test_pools_outlive_the_worker_and_their_allocator_everything(cumem, monkeypatch):
    monkeypatch.setattr(vllm_sleep, "_pluggable", kept := [])
    assert not vllm_sleep.hold_pools()  # no engine ever slept
    cumem.CuMemAllocator.instance = allocator = cumem.CuMemAllocator()
    pool, pluggable = (weakref.ref(one) for one in allocator.allocator_and_pools["weights"])
    assert vllm_sleep.hold_pools()
    allocator.release_pools()  # as vLLM's worker does when it is shut down
    assert pool() is not None
    vllm_sleep.release_pools()
    assert pool() is None
    assert kept == [pluggable()]
    assert not vllm_sleep.hold_pools()


def test_without_vllm_there_is_nothing_to_release(monkeypatch):
    monkeypatch.delitem(sys.modules, vllm_sleep._MODULE, raising=False)
    assert not vllm_sleep.hold_pools()
    vllm_sleep.release_pools()
