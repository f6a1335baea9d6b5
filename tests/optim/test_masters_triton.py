"""fp32 weights taken apart and joined in one kernel, bit for bit as by plain operations: interpreted, or on a GPU."""

import pytest
import torch

from lit_qrl.optim import masters
from lit_qrl.optim.masters import join, split
from tests.triton_interpreter import run_interpreted


def compare(device):
    from lit_qrl.optim import masters_triton

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (5000,), generator=generator).to(torch.int32)
    halfway = (torch.arange(-(2**15), 2**15, 16).to(torch.int32) << 16) | 0x8000
    ends = torch.tensor([0, -(2**31), 0x7F800000, 0x7F7FFFFF, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int64)
    master = torch.cat([bits, halfway, ends.to(torch.int32)]).view(torch.float32)[1:]  # no multiple of a program's size
    weight, low = split(master, torch.bfloat16)
    made = torch.zeros_like(weight, device=device), torch.zeros_like(low, device=device)
    masters_triton.split(master.to(device), *made)
    assert torch.equal(made[0].cpu().view(torch.int16), weight.view(torch.int16))
    assert torch.equal(made[1].cpu(), low)
    joined = masters_triton.join(weight.to(device).view(-1, 2), low.to(device).view(-1, 2)).cpu()
    assert torch.equal(joined.view(torch.int32), join(weight, low).view(-1, 2).view(torch.int32))


def compare_steps(device):
    from lit_qrl.optim import masters

    def trained(at_once):
        masters._in_one_pass = lambda parameter: at_once
        torch.manual_seed(0)
        weight = torch.nn.Parameter((0.02 * torch.randn(70, 33)).bfloat16().to(device))
        optimizer = masters.MasterWeights([("w", weight)], lambda named: torch.optim.SGD(named, lr=1e-6, momentum=0.9))
        for _ in range(3):
            weight.grad = torch.randn(weight.shape).bfloat16().to(device)
            before = weight._version
            optimizer.step()
            assert weight._version > before  # what was made of the old weights is known to be old
        return weight.detach(), optimizer.master(weight)

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


def compare_adam(device):
    """Steps of the kernel beside those of torch's on fp32 weights; the states are torch's own."""
    from lit_qrl.optim import masters

    def trained(kind, at_once, **options):
        masters._in_one_pass = lambda parameter: at_once
        torch.manual_seed(0)
        weights = [torch.nn.Parameter((0.02 * torch.randn(shape)).bfloat16().to(device)) for shape in ((70, 33), (9,))]
        named = list(zip("ab", weights, strict=True))
        optimizer = masters.MasterWeights(named, lambda named: kind(named, lr=1e-4, **options))
        for number in range(4):
            for weight in weights:
                weight.grad = torch.randn(weight.shape).bfloat16().to(device)
            if number == 2:
                weights[1].grad = None
                optimizer.param_groups[0]["lr"] = 3e-5
            before = weights[0]._version
            optimizer.step()
            assert weights[0]._version > before
        return optimizer, weights

    for kind in (torch.optim.AdamW, torch.optim.Adam):
        for options in ({}, {"weight_decay": 0.1}, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0}):
            (ours, mine), (theirs, other) = trained(kind, True, **options), trained(kind, False, **options)
            for one, two in zip(mine, other, strict=True):
                torch.testing.assert_close(ours.master(one), theirs.master(two), rtol=1e-6, atol=2e-10)
                assert (one != two).float().mean() < 0.01
            (held, plain) = (one.state_dict() for one in (ours, theirs))
            assert held["param_groups"] == plain["param_groups"]
            for number, state in plain["state"].items():
                assert state.keys() == held["state"][number].keys()
                for name, value in state.items():
                    found = held["state"][number][name]
                    assert (found.dtype, found.device) == (value.dtype, value.device)
                    torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7)


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize("compared", [compare, compare_steps, compare_adam])
def test_kernel_in_the_interpreter(compared):
    run_interpreted(compared)


@pytest.mark.gpu
@pytest.mark.parametrize("compared", [compare, compare_steps, compare_adam])
def test_kernel_on_the_device(compared, monkeypatch):
    monkeypatch.setattr(masters, "_in_one_pass", masters._in_one_pass)  # which is put back
    compared(torch.device("cuda"))
