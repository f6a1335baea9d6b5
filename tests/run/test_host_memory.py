"""Host memory in pieces: exact sizes, storages of their own, the same memory again."""

import io

import torch

from lit_qrl.run.host_memory import LARGEST, SMALLEST, HostMemory

SHAPES = [(1,), (), (0, 4), (7, 5), (3, 2, 9), (300, 1000), (1 << 18,), (5,)] * 3
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def filled(memory, seed):
    generator = torch.Generator().manual_seed(seed)
    wanted = [
        torch.randint(0, 2, shape, generator=generator).to(DTYPES[number % len(DTYPES)])
        for number, shape in enumerate(SHAPES)
    ]
    return wanted, [memory.like(tensor).copy_(tensor) for tensor in wanted]


def test_pieces_do_not_overlap_and_are_saved_with_their_own_bytes_alone():
    memory = HostMemory(pinned=False)
    wanted, held = filled(memory, 0)
    for tensor, piece in zip(wanted, held, strict=True):
        assert (piece.shape, piece.dtype, piece.is_contiguous()) == (tensor.shape, tensor.dtype, True)
        assert piece.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert torch.equal(piece.float(), tensor.float())
    file = io.BytesIO()
    torch.save(held[3], file)
    assert file.tell() < 5000
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), wanted[3])


def test_after_a_reset_the_same_memory_is_handed_out():
    memory = HostMemory(pinned=False)
    _, first = filled(memory, 0)
    size = memory.bytes
    memory.reset()
    wanted, second = filled(memory, 1)
    assert memory.bytes == size
    assert [piece.data_ptr() for piece in second] == [piece.data_ptr() for piece in first]
    assert all(torch.equal(piece.float(), tensor.float()) for piece, tensor in zip(second, wanted, strict=True))


def test_chunks_take_little_more_than_their_tensors():
    """Of the states of Qwen2.5-0.5B, whose matrices lie far above powers of two; nothing of it is touched."""
    memory = HostMemory(pinned=False)
    shapes = [(151936, 896)] + 24 * [(896, 896), (128, 896), (128, 896), (896, 896), *2 * [(4864, 896)], (896, 4864)]
    asked = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in shapes
        for dtype in (torch.bfloat16, torch.float32, torch.float32)
    ]
    total = sum(tensor.nbytes for tensor in asked)
    for tensor in asked:
        memory.like(tensor)
    rounded = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in asked)
    assert rounded > 1.8 * total
    assert total <= memory.bytes < 1.3 * total
    assert all(len(chunk) in (len(chunk) & -len(chunk), LARGEST) and len(chunk) >= SMALLEST for chunk in memory._chunks)
