import pytest
import torch

from lit_qrl.optim import masters
from tests.triton_interpreter import everywhere


@everywhere
def test_adam(device):
    """Steps of the kernel beside those of torch's on fp32 weights; the states are torch's own."""

    def trained(kind, at_once, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masters, "_in_one_pass", lambda parameter: at_once)
            torch.manual_seed(0)
            drawn = ((0.02 * torch.randn(shape)).bfloat16() for shape in ((70, 33), (9,)))
            weights = [torch.nn.Parameter(one.to(device)) for one in drawn]
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
