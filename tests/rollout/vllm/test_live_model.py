"""A live model seen through checkpoint names, with plain modules in place of vLLM's; whole publishes: test_vllm*.py."""

import pytest
import torch
from torch import nn

from lit_qrl.receipts.ledger import ReceivedLedger, SentLedger, compare
from lit_qrl.rollout.vllm import live_model as module
from lit_qrl.rollout.vllm.live_model import LiveModel


class Fused(nn.Linear):
    def __init__(self):
        super().__init__(6, 16, bias=False)
        self.output_sizes = [8, 4, 4]


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"]}

    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"qkv_proj": Fused(), "o_proj": nn.Linear(8, 6, bias=False)})
        self.norm = nn.LayerNorm(6, bias=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.embed = nn.Embedding(10, 6)
        self.embed.weight = self.head.weight


@pytest.fixture
def live(monkeypatch):
    model = Model()
    monkeypatch.setattr(module, "checkpoint_names", lambda module: {*module._parameters, *module._buffers})
    return LiveModel(model, None)


def test_parts_of_a_fused_layer_are_located(live):
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        place = live.locate(f"attn.{name}.weight")
        assert (place.module_name, place.part, place.attribute) == ("attn.qkv_proj", part, "weight")
    assert live.locate("attn.k_proj.weight").parts == ("q_proj", "k_proj", "v_proj")
    assert live.locate("attn.o_proj.weight").parts == ()  # a single part is no fusion


def test_layers_are_told_by_the_module_that_holds_them(live):
    parts = [f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "no_such_layer")]
    assert live.holders(parts) == {"attn.qkv_proj": parts[:3], "attn.o_proj": parts[3:4]}


def test_what_no_module_holds_is_not_located(live):
    assert live.locate("attn.o_proj.bias_of_another_kind") is None
    assert live.locate("mlp.up_proj.weight") is None
    assert live.locate_layer("experts.0.up_proj") is None


def test_adapters_wrap_layers_without_changing_their_names():
    model = Model()
    wrapper = nn.Module()
    wrapper.base_layer = model.attn["o_proj"]
    model.attn["o_proj"] = wrapper
    assert LiveModel(model, None).locate_layer("attn.o_proj").module is wrapper.base_layer


def test_norms_are_replaced_in_the_memory_that_is_there(live):
    norm = live.model.norm.weight
    new, ledger, sent = torch.arange(6.0), ReceivedLedger(2), SentLedger(2)
    sent.record("norm.weight", new)
    address = norm.data_ptr()
    live.replace(iter([("norm.weight", new)]), ledger)
    assert torch.equal(norm, new)
    assert norm.data_ptr() == address
    assert compare(sent, ledger) == []
    for name, tensor in (("norm.weight", torch.ones(7)), ("norm.gain", new)):
        with pytest.raises(ValueError, match=f"{name} cannot be replaced in place"):
            live.replace(iter([(name, tensor)]), ledger)


def test_nothing_is_read_back_before_it_was_sent(live):
    assert live.read_back("norm.weight") is None
    assert live.formats() == {}
