"""The dry run before a first publish: what it runs, and that nothing comes of it."""

import random

import numpy
import pytest
import torch

from lit_qrl import formats
from lit_qrl.rollout.vllm import warm_up as module
from lit_qrl.rollout.vllm.warm_up import warm_up

NAMES = ["fp8_tensor", "fp8_row", "fp8_block", "int8_channel", "int4_group", "nvfp4", "mxfp4", "nf4"]


@pytest.mark.parametrize("name", [None, *NAMES])
def test_it_runs_the_quantizer_and_the_ledger_on_the_learners_dtype_and_draws_nothing(name, monkeypatch):
    format = None if name is None else formats.get(name)
    seen, ledgers = [], []

    class Ledger(module.SentLedger):
        def __init__(self, *args):
            super().__init__(*args)
            ledgers.append(self)

    monkeypatch.setattr(module, "SentLedger", Ledger)
    if format is not None:
        quantize = type(format).quantize
        monkeypatch.setattr(
            type(format),
            "quantize",
            lambda self, weight, *rest: (seen.append((weight.dtype, weight.shape)), quantize(self, weight, *rest))[1],
        )
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    names = warm_up(format, torch.float32, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())
    # A format whose scales have the weights' dtype is quantized from the engine's.
    dtype = torch.bfloat16 if format is not None and format.scales_like_weight else torch.float32
    assert seen == ([] if format is None else [(dtype, (module.SIDE, module.SIDE))])
    assert names[-1] == "norm.weight"
    assert {layer.rpartition(".")[0] for layer in names[:-1]} == {"layer"}
    (ledger,) = ledgers
    assert list(ledger.columns) == ["layer"]  # multiplied out
    assert all(receipt.finite for receipt in ledger.receipts().values())
    assert ledger.receipts()["norm.weight"].dtype == "bfloat16"


def test_a_format_that_the_small_layer_does_not_fit_is_left_alone():
    format = formats.Int4Group(group_size=1024)
    assert warm_up(format, torch.float32, torch.bfloat16, torch.device("cpu")) == []
