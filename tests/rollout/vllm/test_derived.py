"""Pieces of a latent attention against the layer that they are made of; a whole engine: tests/families."""

import torch
from torch import nn

from lit_qrl.rollout.vllm import live_model
from lit_qrl.rollout.vllm.locations import Place

HEADS, INNER, VALUES, LATENT = 3, 4, 2, 16


class UnquantizedLinearMethod:
    pass


class Attention(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.kv_b_proj = nn.Linear(LATENT, weight.shape[0], bias=False)
        self.kv_b_proj.weight.data = weight
        self.kv_b_proj.quant_method = UnquantizedLinearMethod()

    def process_weights_after_loading(self, dtype):
        both = self.kv_b_proj.weight.data.T.reshape(LATENT, HEADS, INNER + VALUES)
        self.W_UK_T = nn.Parameter(both[..., :INNER].permute(1, 2, 0).contiguous())
        self.W_UV = nn.Parameter(both[..., INNER:].transpose(0, 1).contiguous())


def columns_of(module, columns):
    return module.weight.detach()[:, columns]


def test_a_piece_that_was_not_made_again_is_named(monkeypatch):
    monkeypatch.setattr(live_model, "restored_names", lambda module: set())
    attention = Attention(torch.randn(HEADS * (INNER + VALUES), LATENT))
    assert live_model.derived_names(attention) == set()
    attention.process_weights_after_loading(torch.float32)
    assert live_model.derived_names(attention) == {"W_UK_T", "W_UV"}
    assert live_model.derived_names(attention.kv_b_proj) == set()
    modules = {"attn": attention}
    assert live_model.stale_derived(modules, columns_of) == []
    attention.kv_b_proj.weight.data[INNER:] += 4e-5  # all but the first head's keys
    assert {fault.name for fault in live_model.stale_derived(modules, columns_of)} == {"attn.W_UK_T", "attn.W_UV"}
    attention.process_weights_after_loading(torch.float32)
    attention.W_UV.data[0, 0, 0] += 1
    assert [str(fault.kind) + fault.name for fault in live_model.stale_derived(modules, columns_of)] == [
        "derivedattn.W_UV"
    ]
    assert live_model.stale_derived({"other": nn.Linear(2, 2)}, columns_of) == []


def test_what_a_loader_computed_is_held_to_what_was_sent():
    def composed_weight_loader():
        def composed_loader(parameter, loaded):
            parameter.data.copy_(-torch.exp(loaded))

        return composed_loader

    mixer = nn.Module()
    mixer.A, mixer.D = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    mixer.A.weight_loader = composed_weight_loader()
    logarithm = torch.tensor([0.0, 1.0, 2.0])
    assert live_model.computing_loader(mixer.D) is None
    for held, named in ((-logarithm.exp(), []), (-(logarithm + 4e-5).exp(), ["mixer.A_log"])):
        sent = {"mixer.A_log": (Place("mixer", mixer, "A", rewritten=True), logarithm)}
        mixer.A.data.copy_(held)
        assert [fault.name for fault in live_model.wrongly_computed(sent)] == named
        assert sent == {}
