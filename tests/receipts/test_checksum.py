import pytest
import torch

from lit_qrl.receipts.checksum import Checksums, Matrices, slice_of, slices
from tests.operations import counted


def test_what_is_found_on_the_host_needs_no_waiting():
    collected = Checksums()
    collected.add("good", torch.ones(8))
    assert collected.first_non_finite(wait=False) is None
    collected.add("bad", torch.tensor([1.0, float("nan")]))
    collected.add("worse", torch.tensor([float("inf")]))
    assert collected.first_non_finite(wait=False) == collected.first_non_finite() == "bad"
    assert [finite for _, finite in collected.finish().values()] == [True, False, False]


def stacks():
    """Yield stacks of matrices in several layouts: whole, every second of one that is larger, turned."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8):
        values = (10 * torch.randn(6, 4, 12, generator=generator)).to(torch.float32).abs().to(dtype)
        yield values
        yield values.unflatten(1, (2, 2))[:, 1]
        yield values.mT
    yield torch.randn(6, 1, generator=generator)  # one number each


@pytest.mark.parametrize("stack", list(stacks()), ids=lambda one: f"{one.dtype} {one.stride()}")
def test_slices_of_a_stack_have_the_checksums_that_they_have_alone(stack):
    together, alone = Checksums(), Checksums()
    for index, one in enumerate(slices(stack)):
        together.add(str(index), one)
        alone.add(str(index), stack[index])
    assert together.finish() == alone.finish()


def test_matrices_of_a_stack_are_views_of_it():
    stack = torch.randn(3, 4, 8)
    bits = Matrices.of(stack[:, 1:3]).bits()
    assert bits.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()
    alone = [Matrices.of(stack[index : index + 1, 1:3].clone()).bits() for index in range(3)]
    assert torch.equal(bits, torch.cat(alone))


def test_slices_that_were_written_to_or_moved_count_as_they_are():
    stack = torch.randn(3, 4, 8)
    collected = Checksums()
    first, second, third = slices(stack)
    collected.add("first", first)
    second[0, 0] = 3.0
    third = third.clone()
    third[0, 0] = 5.0
    collected.add("second", second)
    collected.add("third", third)
    plain = Checksums()
    for name, tensor in {"first": first, "second": stack[1].clone(), "third": third}.items():
        plain.add(name, tensor)
    assert collected.finish() == plain.finish()


def test_a_slice_that_is_not_finite_is_named_when_it_comes():
    stack = torch.ones(4, 2, 2)
    stack[2, 0, 0] = float("nan")
    collected = Checksums()
    for index, one in enumerate(slices(stack)):
        collected.add(str(index), one)
        assert collected.first_non_finite(wait=False) == ("2" if index >= 2 else None)
    assert [finite for _, finite in collected.finish().values()] == [True, True, False, True]


def test_slices_that_never_came_are_not_in_the_sums():
    collected = Checksums()
    first, _, third = slices(torch.randn(3, 4, 8))
    collected.add("third", third)
    assert list(collected.finish()) == ["third"]
    collected.add("first", first)  # after the sums were taken
    assert list(collected.finish()) == ["third", "first"]


def test_what_the_end_asks_of_the_device_does_not_grow_with_the_tensors():
    def operations(count):
        sums = Checksums()
        for number in range(count):
            sums.add(str(number), torch.randn(8 * (1 + number % 3), 16))
        return counted(sums.finish)

    assert operations(40) == operations(10)


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
