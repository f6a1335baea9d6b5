import pytest
import torch

from lit_qrl import formats
from lit_qrl.network import stacked
from lit_qrl.network.stacked import StackQuantizer
from lit_qrl.network.stream import weight_stream
from lit_qrl.receipts.checksum import slice_of, slices
from lit_qrl.receipts.ledger import SentLedger
from tests.operations import counted

FORMATS = ["fp8_row", "fp8_tensor", "fp8_block", "int8_channel", "int4_group", "nvfp4", "mxfp4", "nf4"]


def experts(count=5, dtype=torch.bfloat16):
    """Gate and up of some experts, as they lie beside one another, and their names."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(count, 256, 128, generator=generator) * torch.linspace(1, 4, count).view(-1, 1, 1)
    gate, up = whole.to(dtype).chunk(2, dim=1)
    return {"gate_proj": gate, "up_proj": up}


def stream(stacks):
    cut = {leaf: slices(stack) for leaf, stack in stacks.items()}
    for index in range(len(next(iter(stacks.values())))):
        yield from ((f"experts.{index}.{leaf}.weight", parts[index]) for leaf, parts in cut.items())


def layers(stacks):
    return [name.removesuffix(".weight") for name, _ in stream(stacks)]


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )


@pytest.mark.parametrize("at_once", [1 << 27, 2 * 128 * 128, 1], ids=["all", "two", "one"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_of_slices_is_that_of_the_matrices_alone(name, at_once, monkeypatch):
    monkeypatch.setattr(stacked, "AT_ONCE", at_once)
    stacks, format = experts(), formats.get(name)
    alone = ((name, tensor.clone()) for name, tensor in stream(stacks))
    made = dict(weight_stream(stream(stacks), format, layers(stacks)))
    assert same(made, dict(weight_stream(alone, format, layers(stacks))))
    codes = made[f"experts.0.gate_proj.{format.suffixes[0]}"]
    assert slice_of(codes) is not None


@pytest.mark.parametrize("name", FORMATS[:-1])  # nf4 has its matrices one by one
def test_sending_many_experts_takes_the_launches_of_few(name):
    def send(count):
        stacks = experts(count)
        named = weight_stream(stream(stacks), formats.get(name), layers(stacks))
        ledger = SentLedger(0)
        return counted(lambda: [list(ledger.watch(named)), ledger.receipts()])

    assert send(32) == send(16)


def test_what_does_not_lie_side_by_side_is_made_one_by_one():
    stacks, quantizer = experts(), StackQuantizer(formats.get("fp8_row"))
    gate, up = (slices(stack) for stack in stacks.values())
    assert quantizer.of({"gate_proj": gate[0], "up_proj": up[0]}) is not None
    assert quantizer.of({"gate_proj": gate[0], "up_proj": up[1]}) is None
    assert quantizer.of({"gate_proj": gate[0], "up_proj": up[0].clone()}) is None
    assert quantizer.of({"gate_proj": gate[0], "up_proj": slices(stacks["up_proj"][:3])[0]}) is None


def test_nothing_is_held_after_the_last_matrix():
    quantizer = StackQuantizer(formats.get("fp8_row"))
    for one in slices(experts()["up_proj"]):
        assert quantizer.of({"up_proj": one}) is not None
    assert quantizer._made is None
    assert quantizer._stacks == ()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["fp8_row", "int4_group", "nvfp4", "nf4"])
def test_an_expert_that_is_not_finite_is_named_and_at_the_end_where_the_device_runs_ahead(name, ahead, monkeypatch):
    if ahead:
        monkeypatch.setattr("lit_qrl.formats.numerics.runs_ahead", lambda tensor: True)
    stacks, came = experts(), []
    stacks["gate_proj"][2, 5, 7] = float("inf") if ahead else float("nan")
    said = " holds NaN or inf" if ahead else ".*NaN or inf"
    with pytest.raises(ValueError, match=rf"experts\.2\.gate_proj\.weight{said}"):
        came.extend(weight_stream(stream(stacks), formats.get(name), layers(stacks)))
    if ahead:  # the whole stream has passed
        assert {name.rpartition(".")[0] for name, _ in came} == set(layers(stacks))


def test_dtypes_are_cast_before():
    stacks, format = experts(dtype=torch.float32), formats.get("int4_group")
    made = dict(weight_stream(stream(stacks), format, layers(stacks), torch.bfloat16))
    cast = {leaf: stack.bfloat16() for leaf, stack in stacks.items()}
    assert same(made, dict(weight_stream(stream(cast), format, layers(stacks))))
