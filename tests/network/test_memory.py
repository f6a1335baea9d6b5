"""Which layers are computed again, on a CPU: a device's memory is played by the test."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from lit_qrl.network import memory
from lit_qrl.network.memory import SelectiveRecomputation, free_memory, kept_layers, room_for_logits
from tests.networks import build_network

LAYERS = 4


def network():
    model = build_network(LlamaConfig, num_hidden_layers=LAYERS, tie_word_embeddings=False).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def forwards(model):
    """Count the passes of each layer's MLP, which a layer that is computed again makes twice."""
    counts = [0] * LAYERS

    def count(index):
        def hook(*_):
            counts[index] += 1

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(count(index))
    return counts


def step(model):
    model(input_ids=torch.arange(6)[None], use_cache=False).logits.logsumexp(-1).sum().backward()


@pytest.mark.parametrize(
    ("total", "free", "reserved", "allocated", "share", "found"),
    [
        # After the first update: 139 GiB in all, 9 free to the driver, 120 reserved by torch, of which 20 hold tensors.
        (139, 9, 120, 20, 1.0, 109),
        # 100 in all, 50 free to the driver, 30 reserved by torch, of which 10 hold tensors, 20 another process's.
        (100, 50, 30, 10, 0.5, 40),
        (100, 50, 30, 10, 0.9, 70),
    ],
)
def test_what_torch_holds_unused_is_free_up_to_the_limit_of_the_process(
    total, free, reserved, allocated, share, found, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    assert free_memory(torch.device("cuda")) == found


def test_logits_may_take_what_is_free_but_for_the_reserve_and_the_heads_gradient(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 30 << 30)
    monkeypatch.setattr(memory, "_total", lambda device: 100 << 30)
    hidden, head = SimpleNamespace(device=torch.device("cuda")), torch.nn.Parameter(torch.empty(1 << 30, device="meta"))
    assert room_for_logits(hidden, head) == (30 - 5 - 6) << 30
    assert room_for_logits(hidden, head.detach()) == (30 - 5) << 30
    with torch.no_grad():  # no backward pass comes
        assert room_for_logits(hidden, head) == 0
    monkeypatch.setattr(memory, "free_memory", lambda device: 9 << 30)
    assert room_for_logits(hidden, head) == 0
    assert room_for_logits(torch.zeros(1), head) == 0


def test_layers_are_kept_up_to_the_memory_that_there_is():
    sizes = {"layers": 8, "tokens": 1000, "each": 50_000, "width": 2000, "gradients": 10**9, "total": 80 * 10**9}
    # 0.05 of 80 GB, 1 GB of gradients, 2 GB of logits, 16 MB of inputs and 150 MB of a layer's backward pass
    taken = 4 * 10**9 + 10**9 + 2 * 10**9 + 16 * 10**6 + 150 * 10**6
    assert kept_layers(**sizes, free=taken) == 0
    assert kept_layers(**sizes, free=taken + 3 * 48 * 10**6) == 3
    assert kept_layers(**sizes, free=taken + 3 * 48 * 10**6 - 1) == 2
    assert kept_layers(**sizes, free=taken + 100 * 48 * 10**6) == 8
    assert kept_layers(**sizes, free=0) == 0
    small = 10**9 + 10**9 + 2**30 + 16 * 10**6 + 150 * 10**6 + 48 * 10**6  # 1 GiB of logits on a small one
    assert kept_layers(**{**sizes, "total": 20 * 10**9}, free=small) == 1


@pytest.mark.parametrize("kept", [0, 1, 3, LAYERS])
def test_the_last_layers_are_kept_and_the_gradient_stays(kept):
    plain = network()
    plain.gradient_checkpointing_disable()
    step(plain)
    model = network()
    choice = SelectiveRecomputation(model)
    model.model._forward_pre_hooks.clear()  # nobody chooses
    choice.kept, choice._passes = kept, memory.MEASURED + 1
    counts = forwards(model)
    step(model)
    assert counts == [2] * (LAYERS - kept) + [1] * kept
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_first_two_passes_measure_and_all_but_the_first_choose(monkeypatch):
    model = network()
    choice = SelectiveRecomputation(model)
    counts = forwards(model)
    step(model)
    assert choice.kept == 0  # on a CPU
    assert counts == [2] * LAYERS

    copies = 6 * 100  # of weights, in the first pass alone
    held = iter([1000, 1000 + 6 * 500 + copies, *[2000, 2000 + 6 * 500] * 2])
    monkeypatch.setattr(memory.torch.cuda, "memory_allocated", lambda device=None: next(held))
    monkeypatch.setattr(memory, "_on_one_gpu", lambda parameters: True)
    monkeypatch.setattr(memory, "_total", lambda device: 10**6)
    asked = []
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**30 + 10**6)
    monkeypatch.setattr(memory, "kept_layers", lambda **figures: asked.append(figures) or 2)
    choice._passes = 0
    counts[:] = [0] * LAYERS
    step(model)
    assert choice.kept == 1
    assert counts == [2, 2, 2, 1]
    assert not asked
    counts[:] = [0] * LAYERS
    model.lm_head.weight.grad = None
    with torch.no_grad():  # scoring chooses nothing
        model(input_ids=torch.arange(3)[None])
    assert not asked
    counts[:] = [0] * LAYERS
    step(model)
    assert counts == [2, 2, 1, 1]
    assert choice.again == LAYERS - 2
    figures = {
        "layers": LAYERS, "tokens": 6, "each": 600.0, "width": 128, "free": 2**30 + 10**6,
        "gradients": model.lm_head.weight.nbytes, "total": 10**6,
    }  # fmt: skip
    assert asked == [figures]
    step(model)  # which measures no more, and finds the copies
    assert asked[1:] == [{**figures, "each": 500.0, "gradients": 0}]
    model.zero_grad()
    step(model)  # which makes them again
    assert asked[2] == {
        **figures,
        "each": 500.0,
        "gradients": copies * LAYERS + sum(one.nbytes for one in model.parameters()),
    }
