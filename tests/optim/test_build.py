import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.optim import MuonAdamW
from lit_qrl.optim.build import build_optimizer, check_optimizer

CPU = torch.device("cpu")


class ScheduleFree(torch.optim.SGD):
    def train(self):
        self.ready = True

    def eval(self):
        self.ready = False


class AdamW8bit(torch.optim.SGD):
    __module__ = "bitsandbytes.optim.adamw"

    def step(self, closure=None):
        pass


class WithoutKernel(AdamW8bit):
    __module__ = "bitsandbytes.optim.adamw"

    def step(self, closure=None):
        raise NotImplementedError("no kernel for cpu\nmore")


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda named: torch.optim.AdamW(named, lr=-1.0), r"Invalid learning rate: -1.*init_args"),
        (lambda named: MuonAdamW(named, lr=-3.0), "-3"),
        (lambda named: torch.optim.AdamW(named, foo=1), "foo"),
        (
            lambda named: torch.optim.AdamW(named, fused=True, foreach=True),
            "cannot be built: `fused` and `foreach`.*init_args",
        ),
        (torch.optim.SparseAdam, r"SparseAdam cannot take a step.*dense gradients.*torch\.optim\.AdamW\.$"),
        (torch.optim.LBFGS, r"LBFGS evaluates the loss several times.*torch\.optim\.AdamW\.$"),
        (ScheduleFree, r"ScheduleFree has other weights in training.*torch\.optim\.AdamW\.$"),
        (WithoutKernel, r"cannot take a step on cpu.*no kernel for cpu\. Train on a GPU"),
    ],
)
def test_an_optimizer_that_cannot_work_is_known_at_once(optimizer, said):
    with pytest.raises(ConfigError, match=said):
        check_optimizer(optimizer, CPU)


def test_an_optimizer_that_works_is_taken():
    check_optimizer(AdamW8bit, CPU)
    check_optimizer(lambda named: torch.optim.LBFGS(named, max_iter=1), CPU)  # takes no step without a closure


def test_plain_muon_is_refused_where_there_are_vectors():
    with pytest.raises(ConfigError, match="Use MuonAdamW"):
        check_optimizer(torch.optim.Muon, CPU)
    check_optimizer(torch.optim.Muon, CPU, vectors=False)  # an adapter has matrices alone
    made = build_optimizer(torch.optim.Muon, [("a", nn.Parameter(torch.zeros(2, 2)))])
    assert made.param_groups[0]["param_names"] == ["a"]
