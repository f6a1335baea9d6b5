import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.optim import MuonAdamW
from lit_qrl.optim.build import build_optimizer, check_optimizer

CPU = torch.device("cpu")


def test_settings_that_an_optimizer_refuses_are_known_at_once():
    with pytest.raises(ConfigError, match=r"Invalid learning rate: -1.*init_args"):
        check_optimizer(lambda named: torch.optim.AdamW(named, lr=-1.0), CPU)
    with pytest.raises(ConfigError, match="-3"):
        check_optimizer(lambda named: MuonAdamW(named, lr=-3.0), CPU)
    with pytest.raises(ConfigError, match="foo"):
        check_optimizer(lambda named: torch.optim.AdamW(named, foo=1), CPU)


def test_plain_muon_is_refused_where_there_are_vectors():
    with pytest.raises(ConfigError, match="Use MuonAdamW"):
        check_optimizer(torch.optim.Muon, CPU)
    check_optimizer(torch.optim.Muon, CPU, vectors=False)  # an adapter has matrices alone
    made = build_optimizer(torch.optim.Muon, [("a", nn.Parameter(torch.zeros(2, 2)))])
    assert made.param_groups[0]["param_names"] == ["a"]


@pytest.mark.parametrize("works", [True, False])
def test_bitsandbytes_must_have_a_step_for_the_device(works):
    class AdamW8bit(torch.optim.SGD):
        __module__ = "bitsandbytes.optim.adamw"

        def step(self, closure=None):
            if not works:
                raise NotImplementedError("no kernel for cpu\nmore")

    if works:
        check_optimizer(AdamW8bit, CPU)
        return
    with pytest.raises(ConfigError, match=r"cannot take a step on cpu.*no kernel for cpu\. Train on a GPU"):
        check_optimizer(AdamW8bit, CPU)


def test_an_optimizer_for_other_gradients_is_known_at_once():
    with pytest.raises(ConfigError, match=r"SparseAdam cannot take a step.*dense gradients.*torch\.optim\.AdamW\.$"):
        check_optimizer(torch.optim.SparseAdam, CPU)
    check_optimizer(lambda named: torch.optim.LBFGS(named, max_iter=1), CPU)  # takes no step without a closure


def test_an_optimizer_that_moves_and_asks_for_the_loss_again_is_known_at_once():
    with pytest.raises(ConfigError, match=r"LBFGS evaluates the loss several times.*torch\.optim\.AdamW\.$"):
        check_optimizer(torch.optim.LBFGS, CPU)


def test_an_optimizer_with_weights_of_its_own_for_evaluation_is_known_at_once():
    class ScheduleFree(torch.optim.SGD):
        ready = False

        def train(self):
            self.ready = True

        def eval(self):
            self.ready = False

        def step(self, closure=None):
            if not self.ready:
                raise RuntimeError("Optimizer was not in train mode when step is called.")

    with pytest.raises(ConfigError, match=r"ScheduleFree has other weights in training.*torch\.optim\.AdamW\.$"):
        check_optimizer(ScheduleFree, CPU)


def test_flags_that_exclude_each_other_are_known_at_once():
    with pytest.raises(ConfigError, match=r"cannot be built: `fused` and `foreach`.*init_args"):
        check_optimizer(lambda named: torch.optim.AdamW(named, fused=True, foreach=True), CPU)
