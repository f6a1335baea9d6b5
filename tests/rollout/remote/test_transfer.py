"""Tensors arrive bit for bit, whichever way they go."""

import multiprocessing
import os
import pickle

import pytest
import torch

from lit_qrl.rollout.remote import transfer

TENSORS = [
    ("scalar", torch.tensor(3.5)),
    ("nothing", torch.empty(0, 4)),
    ("codes", torch.arange(200, dtype=torch.uint8).view(4, 50)),
    ("fp8", torch.randn(7, 5).to(torch.float8_e4m3fn)),
    ("half", torch.randn(9, 3, dtype=torch.bfloat16).T),
]


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), bytes(transfer.raw(tensor).tolist())


@pytest.mark.parametrize("way", ["memory", "socket"])
def test_a_chunk_arrives_as_it_was(way):
    message, following = transfer.pack(TENSORS, way, transfer.SharedMemory())
    came = [bytearray(piece) for piece in following]
    got = transfer.unpack(message, came, transfer.Mapped(), torch.device("cpu"))
    assert [name for name, _ in got] == [name for name, _ in TENSORS]
    assert [bits(tensor) for _, tensor in got] == [bits(tensor) for _, tensor in TENSORS]


def test_what_was_unpacked_is_a_copy():
    memory = transfer.SharedMemory()
    mapped = transfer.Mapped()
    first, _ = transfer.pack([("a", torch.ones(4))], "memory", memory)
    got = transfer.unpack(first, [], mapped, torch.device("cpu"))
    second, _ = transfer.pack([("a", torch.zeros(4))], "memory", memory)
    assert torch.equal(got[0][1], torch.ones(4))
    assert torch.equal(transfer.unpack(second, [], mapped, torch.device("cpu"))[0][1], torch.zeros(4))


def test_memory_is_not_taken_for_a_former_one_of_its_name():
    spares = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]  # below those of a file and its map
    first, mapped = transfer.SharedMemory(64), transfer.Mapped()
    assert not mapped.bytes(first.name, 64).any()
    for spare in spares:
        os.close(spare)
    first.reserve(128)
    second = transfer.SharedMemory(64)
    second.bytes.fill_(7)
    assert mapped.bytes(second.name, 64).eq(7).all()
    assert len(mapped.bytes(first.name, 128)) == 128
    first.close()
    second.close()


def test_memory_grows_and_is_seen_by_another_process():
    memory = transfer.probe()
    child = os.fork()  # a pool of forked workers would wait for threads that a fork does not have
    if child == 0:
        seen = False
        try:
            seen = transfer.sees(memory.name)
        finally:
            os._exit(not seen)
    assert os.waitpid(child, 0)[1] == 0
    size = memory.size
    memory.reserve(3 * size)
    assert memory.size == 3 * size
    assert len(memory.bytes) == 3 * size
    memory.close()
    assert not transfer.sees("/proc/1/fd/999999")


def test_as_many_pieces_stay_open_as_are_under_way_and_one_that_grew_is_another(monkeypatch):
    asked = []
    monkeypatch.setattr(transfer, "opened", lambda name, size: asked.append((name, size)) or torch.zeros(size))
    mapped = transfer.Mapped()
    for name, size in [("a", 1), ("b", 1), ("a", 1), ("b", 1), ("c", 9), ("b", 1), ("c", 9)]:
        assert mapped.bytes(name, size).numel() == size
    assert asked == [("a", 1), ("b", 1), ("c", 9)]
    mapped.bytes("a", 1)
    assert asked[-1] == ("a", 1)


@pytest.mark.gpu
def test_a_chunk_of_a_gpu_arrives_as_it_was_in_another_process():
    memory = transfer.DeviceMemory(torch.device("cuda"))
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        for _ in range(2):
            message, _ = transfer.pack([(name, one.cuda()) for name, one in TENSORS], "ipc", memory)
            assert pool.apply(_bits_of, (pickle.dumps(message),)) == [bits(tensor) for _, tensor in TENSORS]


MAPPED = transfer.Mapped()


def _bits_of(message):
    got = transfer.unpack(pickle.loads(message), [], MAPPED, torch.device("cuda"))
    return [bits(tensor) for _, tensor in got]


def test_other_memory_is_not_taken_for_the_runs():
    assert not transfer.sees(transfer.SharedMemory(4096).name)


def test_messages_carry_tensors_of_every_dtype_by_their_bytes():
    got = pickle.loads(transfer.dumps({"tensors": [tensor for _, tensor in TENSORS], "words": ["a"]}))
    assert [bits(tensor) for tensor in got["tensors"]] == [bits(tensor) for _, tensor in TENSORS]
    assert got["words"] == ["a"]
