"""Ledgers and their comparison, against loops in Python and against every way in which a publish can go wrong."""

import copy
import pickle

import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.receipts.checksum import COLUMN_OFFSET, GOLDEN, MIX_A, MIX_B, Checksums, Matrices
from lit_qrl.receipts.ledger import (
    Fault,
    Ledger,
    PublishError,
    ReceivedLedger,
    SentLedger,
    compare,
    compare_columns,
    compare_receipts,
    read_receipts,
    share_of_bound,
)

WORD = 2**64
LEARNING_RATE = 4e-5


def signed(value):
    value %= WORD
    return value - WORD if value >= WORD // 2 else value


def scrambled(x):
    x = ((x ^ (x >> 30)) * MIX_A) % WORD
    x = ((x ^ (x >> 27)) * MIX_B) % WORD
    return x ^ (x >> 31)


def loop_checksum(tensor):
    """Σ_i h(u_i Σ_j x_ij) + Σ_j h(v_j Σ_i x_ij) modulo 2⁶⁴, entry by entry."""
    matrix = Matrices.of(tensor.unsqueeze(0)).bits()[0].tolist()
    rows = [sum(row) for row in matrix]
    columns = [sum(row[j] for row in matrix) for j in range(len(matrix[0]))]
    total = 0
    for start, sums in ((0, rows), (COLUMN_OFFSET, columns)):
        for i, value in enumerate(sums):
            odd = scrambled((start + i + 1) * GOLDEN % WORD) | 1
            total += scrambled(value * odd % WORD)
    return signed(total)


def checksum(tensor):
    collected = Checksums()
    collected.add("tensor", tensor)
    return collected.finish()["tensor"][0]


def weights(seed=0, dtype=torch.bfloat16, step=0.0):
    """A model of two layers; `step` moves every weight by about one AdamW step at that learning rate."""
    generator = torch.Generator().manual_seed(seed)
    named = {"model.embed_tokens.weight": torch.randn(32, 128, generator=generator)}
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (256, 128),
            "self_attn.k_proj": (128, 128),
            "self_attn.v_proj": (128, 128),
            "self_attn.o_proj": (128, 256),
            "mlp.down_proj": (128, 384),
        }.items():
            named[f"model.layers.{layer}.{name}.weight"] = 0.02 * torch.randn(shape, generator=generator)
        named[f"model.layers.{layer}.input_layernorm.weight"] = torch.rand(128, generator=generator) + 0.5
    direction = torch.Generator().manual_seed(99)
    return {
        name: (tensor + step * torch.randn(tensor.shape, generator=direction).sign()).to(dtype)
        for name, tensor in named.items()
    }


def ledgers(sent_tensors, received_tensors, version=1):
    sent, received = SentLedger(version), ReceivedLedger(version)
    for name, tensor in sent_tensors.items():
        sent.record(name, tensor)
    for name, tensor in received_tensors.items():
        received.record(name, tensor)
    return sent, received


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.randint(-128, 127, (3, 5), dtype=torch.int8, generator=torch.Generator().manual_seed(0)),
        torch.tensor(3.5),
        torch.zeros(2, 3, 4),
        torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn),
        torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).T,
        torch.randn(9, generator=torch.Generator().manual_seed(0))[3:],
        torch.randn(64, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    ],
)
def test_checksum_is_the_sum_over_rows_and_columns_of_the_bits(tensor):
    assert checksum(tensor) == loop_checksum(tensor)


def test_checksum_of_nothing_and_of_a_copy():
    assert checksum(torch.empty(0, 3)) == checksum(torch.empty(3, 0)) == 0
    tensor = torch.randn(100, 64)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.T.contiguous().T)


@pytest.mark.parametrize(
    "change",
    {
        "negated": torch.neg,
        "transposed": lambda w: w.T,
        "rows turned": lambda w: w.flip(0),
        "columns turned": lambda w: w.flip(1),
        "two rows exchanged": lambda w: w[torch.tensor([1, 0, *range(2, 64)])],
        "two columns exchanged": lambda w: w[:, torch.tensor([1, 0, *range(2, 64)])],
        "a block transposed": lambda w: torch.cat([torch.cat([w[:32, :32].T, w[:32, 32:]], 1), w[32:]], 0),
        "rolled by a whole word": lambda w: w.roll(8, dims=1),
        "zeroed": torch.zeros_like,
        "one entry by one unit in the last place": lambda w: w.clone().index_put_(
            (torch.tensor(3), torch.tensor(5)), torch.nextafter(w[3, 5], torch.tensor(9.0))
        ),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_rearranged_weights_have_another_checksum(change):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    assert checksum(change[1](weight)) != checksum(weight)


def test_checksums_come_in_the_order_of_the_names_and_flag_what_is_not_finite():
    collected = Checksums()
    good, bad = torch.ones(3, 2), torch.tensor([1.0, float("inf")])
    nan8 = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    collected.add("good", good)
    assert collected.first_non_finite() is None
    for name, tensor in {"inf": bad, "nan8": nan8, "codes": torch.tensor([127, 255], dtype=torch.uint8)}.items():
        collected.add(name, tensor)
    assert collected.first_non_finite() == "inf"
    assert [finite for _, finite in collected.finish().values()] == [True, False, False, True]


Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
V, NORM = "model.layers.1.self_attn.v_proj.weight", "model.layers.1.input_layernorm.weight"


def without(named, *names):
    return {name: tensor for name, tensor in named.items() if name not in names}


CORRUPTIONS = {
    "layer skipped": (lambda new, old: new | {Q: old[Q]}, {("stale", Q)}),
    "tensor dropped": (lambda new, old: without(new, K), {("missing", K)}),
    "two layers exchanged": (lambda new, old: new | {K: new[V], V: new[K]}, {("swapped", K), ("swapped", V)}),
    "old norms": (lambda new, old: new | {NORM: old[NORM]}, {("stale", NORM)}),
    "another dtype": (lambda new, old: new | {Q: new[Q].float()}, {("dtype", Q)}),
    "another shape": (lambda new, old: new | {Q: new[Q].view(128, 256)}, {("shape", Q)}),
    "one entry": (lambda new, old: new | {Q: new[Q].clone().index_fill_(1, torch.tensor([5]), 0)}, {("different", Q)}),
    "NaN": (lambda new, old: new | {Q: torch.full_like(new[Q], float("nan"))}, {("non_finite", Q)}),
    "an unknown tensor": (lambda new, old: new | {"model.extra.weight": new[Q]}, {("extra", "model.extra.weight")}),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_corruption_one_step_later_is_named(name):
    corrupt, expected = CORRUPTIONS[name]
    old, new = weights(), weights(step=LEARNING_RATE)
    assert any(not torch.equal(old[key], new[key]) for key in old)
    previous = ledgers(old, old, version=0)[0].receipts()
    sent, received = ledgers(new, corrupt(new, old))
    assert {(fault.kind, fault.name) for fault in compare(sent, received, previous)} == expected


def test_version_prefix_cache_and_repetition_are_named():
    named = weights()
    sent, received = ledgers(named, named)
    received.version, received.prefix_reset = 0, False
    received.record(Q, named[Q])
    received.faults.append(Fault("not_copied", "model.layers.0.self_attn.qkv_proj.weight"))
    kinds = [fault.kind for fault in compare(sent, received)]
    assert kinds == ["not_copied", "version", "prefix_cache", "twice"]


def test_equal_tensors_are_not_taken_for_each_other():
    named = {"a.weight": torch.ones(8), "b.weight": torch.ones(8), "c.weight": torch.zeros(8)}
    sent, received = ledgers(named, named)
    assert compare(sent, received) == []


def test_sender_refuses_what_is_not_finite_before_the_engine_gets_it():
    named = weights()
    named[K][3, 4] = float("inf")
    seen = []
    with pytest.raises(ConfigError, match=r"^model\.layers\.0\.self_attn\.k_proj\.weight holds NaN or inf"):
        seen.extend(name for name, _ in SentLedger(5).watch(iter(named.items())))
    assert seen[-1] == Q


def test_ledger_counts_bytes_and_passes_tensors_on_unchanged():
    named = weights()
    sent = SentLedger(0)
    passed = dict(sent.watch(iter(named.items())))
    assert all(passed[name] is named[name] for name in named)
    assert sent.bytes == sum(tensor.numel() * 2 for tensor in named.values())


@pytest.mark.parametrize("name", ["bf16", "fp8_tensor", "fp8_row", "fp8_block", "int8_channel", "int4_group", "nvfp4"])
def test_columns_of_sampled_layers_are_those_of_the_dequantized_weight(name):
    format = formats.get(name)
    weight = 0.02 * torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer = "model.layers.0.self_attn.o_proj"
    quantized = format.quantize(weight)
    sent = SentLedger(3, format, {layer: (128, 256)})
    stream = [(f"{layer}.bias", torch.zeros(128)), *format.export(quantized, layer), ("model.norm.weight", weight[0])]
    assert len(list(sent.watch(iter(stream)))) == len(stream)
    columns, expected = sent.columns[layer]
    assert torch.equal(expected, format.dequantize(quantized)[:, columns])
    assert compare_columns(sent, lambda layer, columns: expected.bfloat16(), exact=False) == []
    stale = format.dequantize(format.quantize(1.1 * weight))[:, columns]
    faults = compare_columns(sent, lambda layer, columns: stale, exact=False)
    assert [(fault.kind, fault.name) for fault in faults] == [("gemm", f"{layer}.weight")]


def test_a_block_that_marlin_takes_for_zeros_is_no_fault_and_any_other_is():
    format, layer = formats.get("nvfp4"), "model.layers.0.self_attn.k_proj"
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    weight[5, :16] = 2e-5 * weight.abs().amax()  # its scale is a subnormal E4M3 number
    sent = SentLedger(3, format, {layer: (64, 32)}, columns=8)
    quantized = format.quantize(weight)
    assert 0 < quantized.scales[5, 0].float() < 2**-6
    list(sent.watch(iter(format.export(quantized, layer))))
    columns, expected = sent.columns[layer]
    assert columns[0] < 16 <= columns[-1]
    marlin = format.dequantize(quantized)[:, columns]
    marlin[5, torch.tensor(columns) < 16] = 0
    assert not torch.equal(marlin, expected)
    assert compare_columns(sent, lambda layer, columns: marlin, exact=False) == []
    for row, value in ((5, 1e-5), (6, 0.0)):  # neither what was sent nor zero; zero where the scale is a normal number
        wrong = marlin.clone()
        wrong[row, 0] = value
        faults = compare_columns(sent, lambda layer, columns, wrong=wrong: wrong, exact=False)
        assert [fault.kind for fault in faults] == ["gemm"]


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_divided_engine_only_its_own_part_is_recorded(rank):
    """Columns of a layer whose inputs are divided, rows of one whose outputs are, and a norm that each part holds."""
    format, layers = formats.get("int4_group", group_size=32), {"o_proj": (128, 256), "q_proj": (128, 256)}
    named = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in layers.items()}
    stream = [one for name, weight in named.items() for one in format.export(format.quantize(weight), name)]
    stream.append(("norm.weight", torch.ones(8)))

    def share(name, tensor):
        axis = {"o_proj": 1, "q_proj": 0}.get(name.split(".")[0])
        return tensor if axis is None or tensor.ndim < 2 else tensor.tensor_split(2, dim=axis)[rank]

    sent = SentLedger(3, format, layers)
    assert [tensor for _, tensor in sent.watch(iter(stream), share)] == [tensor for _, tensor in stream]
    parts = {"o_proj": (128, 128), "q_proj": (64, 256)}
    for name, shape in parts.items():
        own = share(f"{name}.weight", format.dequantize(format.quantize(named[name])))
        columns, expected = sent.columns[name]
        assert own.shape == shape
        assert torch.equal(expected, own[:, columns])
    received = ReceivedLedger(3)
    for name, tensor in stream:
        received.record(name, share(name, tensor).clone())
    assert compare(sent, received) == []
    received = ReceivedLedger(3)
    for name, tensor in stream:
        other = name == "o_proj.weight_packed"
        received.record(name, tensor.tensor_split(2, dim=1)[1 - rank].clone() if other else share(name, tensor))
    assert [(fault.kind, fault.name) for fault in compare(sent, received)] == [("different", "o_proj.weight_packed")]


def test_a_bias_that_comes_before_its_fused_group_leaves_a_divided_layer_its_shape():
    format, weight = formats.get("fp8_row"), torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    stream = [("q_proj.bias", torch.zeros(64)), ("k_proj.bias", torch.zeros(64))]
    stream += format.export(format.quantize(weight), "q_proj")
    sent = SentLedger(0, format, {"q_proj": (64, 32)})
    list(sent.watch(iter(stream), lambda name, tensor: tensor[: len(tensor) // 2]))
    columns, expected = sent.columns["q_proj"]
    assert torch.equal(expected, format.dequantize(format.quantize(weight))[:32, columns])


def test_columns_of_plain_layers_must_agree_to_the_bit():
    layer, weight = "mlp.up_proj", torch.randn(64, 32)
    sent = SentLedger(0, None, {layer: (64, 32)})
    list(sent.watch(iter([(f"{layer}.weight", weight)])))
    columns, _ = sent.columns[layer]
    assert compare_columns(sent, lambda layer, columns: weight[:, columns], exact=True) == []
    nudged = weight.clone()
    nudged[7, columns[0]] = torch.nextafter(nudged[7, columns[0]], torch.tensor(9.0))
    assert [f.kind for f in compare_columns(sent, lambda layer, columns: nudged[:, columns], exact=True)] == ["gemm"]
    assert compare_columns(sent, lambda layer, columns: None, exact=True) == []


def test_read_back_finds_what_changed_after_loading():
    named = weights()
    sent, _ = ledgers(named, named)
    held = copy.deepcopy(named)
    assert compare_receipts(sent, read_receipts(held.get, list(named))) == []
    held[NORM][0] += 1
    assert [str(fault.name) for fault in compare_receipts(sent, read_receipts(held.get, list(named)))] == [NORM]
    assert compare_receipts(sent, read_receipts(lambda name: None, list(named))) == []


def test_error_lists_faults_and_survives_pickling():
    error = PublishError([Fault("stale", f"layer{i}") for i in range(10)], version=7)
    again = pickle.loads(pickle.dumps(error))
    assert again.faults == error.faults
    assert "Publish 7 failed" in str(again)
    assert "and 2 more" in str(again)


def test_what_cannot_be_read_back_is_unverified_and_never_compared_with_itself():
    sent, received = SentLedger(1), ReceivedLedger(1, unread=["experts"])
    for name in ("norm.weight", "experts"):
        sent.record(name, torch.ones(4))
    received.record("norm.weight", torch.ones(4))
    assert compare(sent, received) == []  # not missing: nothing is known of it
    received.record("experts", torch.zeros(4))
    assert compare(sent, received) == []
    assert [fault.kind for fault in compare(sent, ReceivedLedger(1, unread=["other"]))] == [
        "missing",
        "missing",
        "extra",
    ]


def test_a_stack_is_recorded_as_its_slices_are():
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 4, 5, generator=generator)
    whole, single = Ledger(1), Ledger(1)
    whole.record_stack(["a", None, "b"], stack)
    single.record("a", stack[0])
    single.record("b", stack[2])
    assert whole.receipts() == single.receipts()
    assert (whole.sizes, whole.bytes, whole.repeated) == (single.sizes, single.bytes, [])
    whole.record_stack(["a", None, "c"], stack)
    single.record("a", stack[0])
    single.record("c", stack[2])
    assert whole.repeated == single.repeated == ["a"]
    assert whole.receipts() == single.receipts()
    broken = stack.clone()
    broken[1, 0, 0] = float("nan")
    whole.record_stack(["x", "y", "z"], broken)
    assert [name for name, receipt in whole.receipts().items() if not receipt.finite] == ["y"]


def fma_products(codes, scale, scale_2, dtype):
    """A unit vector times codes and two scales, as the least careful kernel does it: rounded after every factor."""
    return ((codes.to(dtype) * scale.to(dtype)) * scale_2.to(dtype)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 2.0**-12, 2.0**-20])  # the last are subnormal numbers of fp16
def test_bound_holds_what_rounding_does_and_not_much_more(dtype, size):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-7, 8, (256, 64), generator=generator).float()
    scale = (0.5 + torch.rand(256, 1, generator=generator)).to(dtype).float()
    scale_2 = (size * (1 + torch.rand(1, 1, generator=generator))).to(dtype).float()
    weight = codes * (scale * scale_2)
    share = share_of_bound(fma_products(codes, scale, scale_2, dtype), weight, exact=False)
    assert 0.1 < share.max() <= 1
    if size == 1:
        off = share_of_bound(
            fma_products(codes, scale * (1 + 20 * torch.finfo(dtype).eps), scale_2, dtype), weight, False
        )
        assert off[codes != 0].min() > 1


def test_bound_of_plain_weights_allows_for_numbers_that_matrix_units_take_for_zero():
    weight = torch.tensor([[1.0, 2.0**-130, 0.0]])
    flushed = torch.where(weight.abs() < 2.0**-126, 0, weight)
    assert share_of_bound(flushed, weight, exact=True).max() < 1
    assert share_of_bound(flushed.bfloat16(), weight, exact=True).max() < 1
    assert share_of_bound(torch.zeros(1, 3), weight, exact=True).max() > 1
    assert share_of_bound(torch.tensor([[float("nan"), float("inf"), 0.0]]), weight, exact=True)[0, :2].min() > 1


def test_bound_follows_the_digits_in_which_torch_multiplies_fp32(monkeypatch):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    short = weight.bfloat16()
    assert share_of_bound(short.float(), weight, exact=True).max() > 1
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert 0.4 < share_of_bound(short.float(), weight, exact=True).max() <= 1
    assert share_of_bound(short, weight, exact=True).max() > 1  # bf16 is multiplied as it is
