import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import IncompleteError
from lit_qrl.network.stream import weight_stream
from lit_qrl.receipts.ledger import SentLedger

LAYERS = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"]


def stream():
    """Two layers of attention with biases and norms, in a model's order."""
    generator = torch.Generator().manual_seed(0)
    yield "model.embed_tokens.weight", torch.randn(16, 128, generator=generator)
    for i in range(2):
        for j, p in enumerate("qkvo"):
            name = f"model.layers.{i}.self_attn.{p}_proj"
            yield f"{name}.weight", torch.randn(128, 128, generator=generator) * (j + 1)
            yield f"{name}.bias", torch.randn(128, generator=generator)
        yield f"model.layers.{i}.norm.weight", torch.ones(128)
    yield "lm_head.weight", torch.randn(16, 128, generator=generator)


def test_without_a_format_everything_passes():
    out = list(weight_stream(stream(), None, LAYERS))
    assert [name for name, _ in out] == [name for name, _ in stream()]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(out, stream(), strict=True))
    cast = dict(weight_stream(stream(), None, LAYERS, dtype=torch.bfloat16))
    assert all(tensor.dtype == torch.bfloat16 for tensor in cast.values())


@pytest.mark.parametrize("name", formats.names())
def test_every_layer_is_exported_once_in_its_format(name):
    format = formats.get(name)
    plain = dict(stream())
    amaxes = {i: max(plain[f"model.layers.{i}.self_attn.{p}_proj.weight"].abs().amax() for p in "qkv") for i in (0, 1)}
    out = list(weight_stream(stream(), format, LAYERS))
    exported = dict(out)
    assert len(exported) == len(out)
    for layer in LAYERS:
        shared = amaxes[int(layer.split(".")[2])] if format.shares_amax and "o_proj" not in layer else None
        for key, tensor in format.export(format.quantize(plain[f"{layer}.weight"], shared), layer):
            assert torch.equal(exported.pop(key).view(torch.uint8), tensor.view(torch.uint8))
    dtype = format.dtype if isinstance(format, formats.Dense) else torch.float32
    for key, tensor in exported.items():
        assert torch.equal(tensor, plain[key].to(dtype))


def test_scales_that_have_the_weights_dtype_come_in_the_engines():
    """vLLM keeps the scales of INT4 in bf16 on a CPU, also where the learner is fp32."""
    format, layer = formats.get("int4_group"), LAYERS[0]
    weight = dict(stream())[f"{layer}.weight"]
    made = dict(weight_stream(stream(), format, LAYERS, torch.bfloat16))
    expected = format.quantize(weight.bfloat16())
    assert torch.equal(made[f"{layer}.weight_scale"], expected.scales)
    assert torch.equal(made[f"{layer}.weight_packed"], expected.codes)
    assert made[f"{layer}.weight_scale"].dtype == torch.bfloat16
    held = format.quantize(weight)
    lent = dict(
        weight_stream(stream(), format, LAYERS, torch.bfloat16, lambda name, _: held if name == layer else None)
    )
    assert torch.equal(lent[f"{layer}.weight_scale"], held.scales.bfloat16())
    assert torch.equal(lent[f"{layer}.weight_packed"], held.codes)
    kept = dict(weight_stream(stream(), formats.get("fp8_row"), LAYERS, torch.bfloat16))
    assert kept[f"{layer}.weight_scale"].dtype == torch.float32


def test_parts_of_a_fused_layer_come_out_together():
    names = [name for name, _ in weight_stream(stream(), formats.get("fp8_tensor"), LAYERS)]
    weights = [name for name in names if name.startswith("model.layers.0") and ".weight" in name and "norm" not in name]
    start = names.index(weights[0])
    assert names[start : start + 6] == weights[:6]
    assert [name.split(".")[-2] for name in weights[:6:2]] == ["q_proj", "k_proj", "v_proj"]


def test_no_more_than_one_fused_layer_is_held():
    pulled, sent = set(), set()

    def counted():
        for name, tensor in stream():
            if name.endswith("_proj.weight"):
                pulled.add(name)
            yield name, tensor

    most = 0
    for name, _ in weight_stream(counted(), formats.get("fp8_tensor"), LAYERS):
        most = max(most, len(pulled - sent))
        sent.add(name)
    assert sent >= pulled
    assert most == 3


def test_a_tensor_that_is_not_finite_is_named():
    def broken(target):
        for name, tensor in stream():
            yield name, torch.full_like(tensor, float("nan")) if name == target else tensor

    for target in ("model.layers.1.norm.weight", "model.layers.0.self_attn.k_proj.weight", LAYERS[3] + ".weight"):
        for name in ("fp8_tensor", "int4_group"):
            with pytest.raises(ValueError, match=rf"{target}.*NaN or inf"):
                list(SentLedger(0).watch(weight_stream(broken(target), formats.get(name), LAYERS)))


def test_a_device_that_runs_ahead_is_asked_once_at_the_end(monkeypatch):
    from lit_qrl.formats import numerics
    from lit_qrl.network import stream as export

    asked, last = [], f"{LAYERS[-1]}.weight"
    monkeypatch.setattr(numerics, "runs_ahead", lambda tensor: True)
    check = export.Finite.check
    monkeypatch.setattr(export.Finite, "check", lambda self: asked.append(1) or check(self))

    def broken(targets):
        for name, tensor in stream():
            yield name, torch.full_like(tensor, float("nan")) if name in targets else tensor

    for format in map(formats.get, ("fp8_tensor", "fp8_row", "int4_group", "nvfp4")):
        assert len(list(weight_stream(stream(), format, LAYERS))) >= len(list(stream()))
        for target in ("model.layers.0.self_attn.k_proj.weight", last):
            out = []
            with pytest.raises(ValueError, match=rf"^{target} holds NaN or inf"):
                out.extend(weight_stream(broken({target, last}), format, LAYERS))
    assert len(asked) == 4 * 3
    # outside of a stream the formats go on refusing at once
    with pytest.raises(ValueError, match="NaN or inf"):
        formats.get("fp8_row").quantize(torch.full((8, 128), float("nan")))


def test_a_part_that_is_missing_and_a_layer_that_does_not_fit_are_named():
    without = ((name, tensor) for name, tensor in stream() if "layers.1.self_attn.v_proj.weight" not in name)
    with pytest.raises(IncompleteError, match=r"a weight for model\.layers\.1\.self_attn\.v_proj.*qkv_proj waited"):
        list(weight_stream(without, formats.get("fp8_row"), LAYERS))
    odd = [("a.up_proj.weight", torch.ones(8, 96))]
    with pytest.raises(ValueError, match=r"a\.up_proj does not fit int4_group.*\(8, 96\)"):
        list(weight_stream(odd, formats.get("int4_group"), ["a.up_proj"]))


def test_parameters_come_out_detached():
    parameter = torch.nn.Parameter(torch.randn(128, 128))
    out = dict(weight_stream([("a.weight", parameter), ("n", parameter)], formats.get("fp8_row"), ["a"]))
    assert {"a.weight", "n"} <= out.keys()
    assert not any(tensor.requires_grad for tensor in out.values())
