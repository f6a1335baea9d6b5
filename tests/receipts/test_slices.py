import pytest
import torch

from lit_qrl.receipts.slices import slice_of, slices


def test_every_slice_knows_its_place():
    stack = torch.randn(3, 2, 4)
    for index, one in enumerate(slices(stack)):
        found = slice_of(one)
        assert found is not None
        assert found.stack is stack
        assert found.index == index
        assert torch.equal(one, stack[index])


@pytest.mark.parametrize(
    "change",
    {
        "copied": torch.clone,
        "cast": torch.Tensor.double,
        "detached": torch.detach,
        "turned": lambda one: one.t(),
        "a part": lambda one: one[:1],
    }.items(),
    ids=lambda pair: pair[0],
)
def test_what_is_made_of_a_slice_is_none(change):
    assert slice_of(change[1](slices(torch.randn(3, 2, 4))[1])) is None


def test_a_slice_whose_memory_was_exchanged_is_none():
    one = slices(torch.randn(3, 2, 4))[1]
    one.data = torch.zeros(2, 4)
    assert slice_of(one) is None
