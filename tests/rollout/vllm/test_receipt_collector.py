"""Receipts of a module of experts, with plain tensors in place of vLLM's."""

import pytest
import torch
from torch import nn

from lit_qrl.receipts.ledger import ReceivedLedger, SentLedger, compare
from lit_qrl.rollout.vllm.live_model import ReceiptCollector
from lit_qrl.rollout.vllm.locations import ExpertPlace
from tests.operations import counted

LEAVES = ("gate_proj", "up_proj")


def mixture(count, wide=torch.float32):
    """What was sent of some experts, where it goes, and the tensors that hold it, scales in a wider dtype."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(count, 32, 16, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(count, 32, 1, generator=generator).bfloat16()
    held = {"w13_weight": weights.clone(), "w13_weight_scale": scales.to(wide)}
    stream, sent = {}, {}
    for expert in range(count):
        for part, leaf in enumerate(LEAVES):
            for suffix, stack in (("weight", weights), ("weight_scale", scales)):
                name = f"experts.{expert}.{leaf}.{suffix}"
                stream[name] = stack[expert, 16 * part : 16 * (part + 1)].clone()
                place = ExpertPlace("experts", nn.Module(), f"w13_{suffix}", 2 * expert + part, expert=expert, beside=2)
                sent[name] = place, tuple(stream[name].shape), stream[name].dtype
    return stream, sent, held


def faults(stream, sent, held):
    out, back = SentLedger(1), ReceivedLedger(1)
    for name, tensor in stream.items():
        out.record(name, tensor)
    taken = ReceiptCollector(sent, back)
    taken.take(list(stream), held)
    taken.check_digits()
    return {(fault.kind, fault.name) for fault in compare(out, back)}


def test_every_expert_has_a_receipt_of_its_own():
    stream, sent, held = mixture(4)
    assert faults(stream, sent, held) == set()
    held["w13_weight"][2, 16:] = held["w13_weight"][1, 16:]
    assert faults(stream, sent, held) == {("swapped", "experts.2.up_proj.weight")}
    held["w13_weight_scale"][3, 5] *= 2
    assert ("different", "experts.3.gate_proj.weight_scale") in faults(stream, sent, held)


def test_an_expert_that_did_not_come_has_no_receipt():
    stream, sent, held = mixture(4)
    for name in [name for name in stream if name.startswith("experts.1.gate_proj")]:
        del stream[name], sent[name]
    assert faults(stream, sent, held) == set()


def test_digits_that_the_sent_dtype_cannot_hold_are_named():
    stream, sent, held = mixture(4)
    held["w13_weight_scale"][2, 20] *= 1 + 2**-12  # bf16 drops it: the receipts agree
    assert faults(stream, sent, held) == {("different", "experts.2.up_proj.weight_scale")}


def test_what_does_not_fit_or_was_cast_is_named():
    stream, sent, held = mixture(3)
    held["w13_weight"] = held["w13_weight"][:, :, :8]
    named = {name for name in stream if name.endswith("weight")}
    assert faults(stream, sent, held) == {(kind, name) for name in named for kind in ("shape", "missing")}
    stream, sent, held = mixture(3, torch.float16)
    scales = {name for name in stream if name.endswith("scale")}
    assert {("dtype", name) for name in scales} <= faults(stream, sent, held)


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_receipts_of_many_experts_take_the_launches_of_few(wide):
    def launches(count):
        stream, sent, held = mixture(count, wide)
        ledger = ReceivedLedger(1)
        taken = ReceiptCollector(sent, ledger)
        return counted(lambda: [taken.take(list(stream), held), taken.check_digits(), ledger.receipts()])

    assert launches(64) == launches(16)
