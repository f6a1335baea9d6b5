"""Memory that slept, on an allocator that only counts."""

from types import SimpleNamespace

from lit_qrl.rollout.vllm.patches.sleeping_memory import PATCH
from lit_qrl.rollout.vllm.patches.sleeping_pools import MODULE


class Allocator:
    def __init__(self):
        self.pointer_to_data, self.story = {}, []
        self.python_free_callback = self._python_free_callback

    def _python_free_callback(self, pointer):
        self.story.append(("unmap", pointer))
        return self.pointer_to_data.pop(pointer).handle


def test_what_slept_is_mapped_for_the_moment_in_which_it_is_freed(fake):
    mapped = []
    data = SimpleNamespace(is_asleep=False)
    fake(MODULE, CuMemAllocator=Allocator, AllocationData=data, create_and_map=mapped.append)
    for _ in range(2):  # a second engine
        PATCH.apply((0, 26, 0))
    allocator = Allocator()
    for pointer, asleep in ((1, True), (2, False)):
        allocator.pointer_to_data[pointer] = SimpleNamespace(handle=f"handle {pointer}", is_asleep=asleep)
    assert allocator.python_free_callback(1) == "handle 1"
    assert mapped == ["handle 1"]
    assert allocator.python_free_callback(2) == "handle 2"
    assert mapped == ["handle 1"]
    assert allocator.story == [("unmap", 1), ("unmap", 2)]
    assert not allocator.pointer_to_data
