import torch

from lit_qrl.optim.masters import MasterWeights
from lit_qrl.strategies.colocated import OffloadedState


def stepped(optimizer_class=torch.optim.AdamW):
    """An optimizer with state, and copies of it."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 8)), torch.nn.Parameter(torch.randn(8))]
    optimizer = optimizer_class(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return parameters, optimizer


def tensors(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]


def values(optimizer):
    return [value.clone() for value in tensors(optimizer)]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_state_goes_away_and_comes_back_with_the_same_bits():
    _, optimizer = stepped()
    before, original = values(optimizer), tensors(optimizer)
    offloaded = OffloadedState()
    offloaded.to_host([optimizer])
    assert offloaded.away
    away = tensors(optimizer)
    assert all(a is not b for a, b in zip(away, original, strict=True))
    offloaded.to_host([optimizer])  # twice is once
    assert all(a is b for a, b in zip(tensors(optimizer), away, strict=True))
    offloaded.to_device([optimizer])
    assert not offloaded.away
    assert all(a is not b for a, b in zip(tensors(optimizer), away, strict=True))
    assert equal(before, values(optimizer))


def test_training_goes_on_as_if_nothing_had_happened_and_every_round_uses_the_same_buffers():
    ends, seen = [], []
    for moves in (False, True):
        parameters, optimizer = stepped()
        offloaded = OffloadedState()
        for _ in range(3):
            if moves:
                offloaded.to_host([optimizer, torch.optim.SGD(parameters)])  # which has nothing to move
                seen.append({tensor.data_ptr() for tensor in tensors(optimizer)})
                offloaded.to_device([optimizer])
            optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in parameters]))
    assert torch.equal(*ends)
    assert seen[0] == seen[1] == seen[2]


def test_a_checkpoint_restored_in_between_is_kept():
    _, optimizer = stepped()
    offloaded, saved = OffloadedState(), optimizer.state_dict()
    saved = {**saved, "state": {k: {n: v + 1 for n, v in s.items()} for k, s in saved["state"].items()}}
    offloaded.to_host([optimizer])
    optimizer.load_state_dict(saved)
    restored = values(optimizer)
    offloaded.to_device([optimizer])
    assert equal(restored, values(optimizer))


def test_the_low_bits_of_masters_and_the_state_over_them_go_and_come_back():
    weight = torch.nn.Parameter(torch.randn(4, 8).bfloat16())
    optimizer = MasterWeights([("up", weight)], lambda named: torch.optim.AdamW(named, lr=1e-6))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before, master = values(optimizer.inner), optimizer.master(weight)
    offloaded = OffloadedState()
    offloaded.to_host([optimizer])
    assert offloaded.away
    offloaded.to_device([optimizer])
    assert torch.equal(optimizer.master(weight), master)
    assert equal(before, values(optimizer.inner))
