import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_qrl import formats
from lit_qrl.precision.layers.lora_linear import LoRALinear, keep_factors, swap_lora_linears
from lit_qrl.precision.layers.packed_linear import PackedLinear
from tests.tiny_run import Twin, fit


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.up_proj = nn.Linear(32, 48, bias=bias)
        self.down_proj = nn.Linear(48, 32, bias=bias)

    def forward(self, x):
        return x + self.down_proj(torch.nn.functional.silu(self.up_proj(x)))


def blocks(packed=False, dtype=torch.float32, **options):
    """PEFT's own block, and one of `LoRALinear` over the same weights."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["up_proj", "down_proj"], init_lora_weights=False, **options)
    plain = get_peft_model(Block().to(dtype), config)
    if packed:
        for name in ("up_proj", "down_proj"):
            layer = getattr(plain.base_model.model, name)
            held = PackedLinear.from_linear(layer.base_layer, formats.get("nvfp4"), cache=False)
            held.set_weight(formats.get("nvfp4").quantize(layer.base_layer.weight))
            layer.base_layer = held
    swapped = copy.deepcopy(plain)
    swap_lora_linears(swapped)
    assert sum(type(part) is LoRALinear for part in swapped.modules()) == 2
    return plain, swapped


def run(model, x, autocast=False):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out.float().square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "x": x.grad, **found}


def reference(model, x):
    """Everything in fp64, from plain matrices."""
    x = x.double().requires_grad_()
    factors = {}

    def layer(part, value):
        base = part.base_layer
        weight = base.dequantized(torch.float32) if isinstance(base, PackedLinear) else base.weight
        a, b = (end["default"].weight.detach().double().requires_grad_() for end in (part.lora_A, part.lora_B))
        factors.update({id(part.lora_A["default"].weight): a, id(part.lora_B["default"].weight): b})
        return value @ weight.double().T + base.bias.double() + part.scaling["default"] * (value @ a.T) @ b.T

    block = model.base_model.model
    out = x + layer(block.down_proj, torch.nn.functional.silu(layer(block.up_proj, x)))
    out.square().sum().backward()
    named = {name: factors[id(p)].grad for name, p in model.named_parameters() if id(p) in factors}
    return {"out": out.detach(), "x": x.grad, **named}


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_and_gradients_are_those_of_the_formula(packed):
    _, swapped = blocks(packed)
    x = torch.randn(2, 5, 32)
    found, expected = run(swapped, x), reference(swapped, x)
    assert found.keys() == expected.keys()
    assert len(found) == 6
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value, rtol=1e-4, atol=1e-4 * float(value.abs().max())), name


@pytest.mark.parametrize("packed", [False, True])
def test_under_autocast_the_errors_are_no_larger_than_pefts(packed):
    plain, swapped = blocks(packed, torch.bfloat16)
    x = torch.randn(3, 64, 32).bfloat16()
    ours, pefts, exact = run(swapped, x, True), run(plain, x, True), reference(swapped, x)
    for name, value in exact.items():
        assert ours[name].dtype == pefts[name].dtype
        error, other = (float((found[name].double() - value).square().mean()) for found in (ours, pefts))
        assert error < 1.1 * other, name


def test_a_checkpointed_block_gives_the_same_bits_and_leaves_its_last_product_out(monkeypatch):
    _, swapped = blocks(packed=True)
    calls = []
    own = PackedLinear.product
    monkeypatch.setattr(PackedLinear, "product", lambda layer, x: calls.append(layer.shape) or own(layer, x))
    x = torch.randn(2, 5, 32)
    expected = run(swapped, x)
    swapped.zero_grad()
    calls.clear()
    swapped.forward = partial(checkpoint, swapped.forward, use_reentrant=False)
    found = run(swapped, x)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert calls == [(48, 32), (32, 48), (48, 32)]


def test_factors_are_lowered_once_per_update():
    _, swapped = blocks(dtype=torch.bfloat16)
    layer = swapped.base_model.model.up_proj
    x = torch.randn(4, 32).bfloat16()
    run(swapped, x, True)
    first = layer._low[1]
    run(swapped, x, True)
    assert layer._low[1][0] is first[0]

    class Unseen(torch.optim.Optimizer):
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(1)  # no version counter sees it

    factors = [p for p in swapped.parameters() if p.requires_grad]
    version = layer.lora_A["default"].weight._version
    Unseen(factors, {}).step()
    assert layer.lora_A["default"].weight._version == version
    run(swapped, x, True)
    assert torch.equal(layer._low[1][0], layer.lora_A["default"].weight.bfloat16())
    assert not torch.equal(layer._low[1][0], first[0])


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}])
def test_other_adapters_go_pefts_way(options):
    plain, swapped = blocks(**options)
    x = torch.randn(2, 5, 32)
    found = []
    for model in (plain, swapped):
        torch.manual_seed(1)
        found.append(run(model, x))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_disabled_merged_and_doubled_adapters_go_pefts_way():
    plain, swapped = blocks()
    x = torch.randn(2, 5, 32)
    for model in (plain, swapped):
        model.add_adapter("second", LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            swapped.get_parameter(name).copy_(parameter)
    with plain.disable_adapter(), swapped.disable_adapter():
        assert torch.equal(plain(x), swapped(x))
    for model in (plain, swapped):
        model.base_model.set_adapter(["default", "second"])
    assert torch.equal(plain(x), swapped(x))
    for model in (plain, swapped):
        model.base_model.set_adapter("default")
        model.merge_adapter()
    assert torch.equal(plain(x), swapped(x))


@pytest.mark.parametrize("packed", [False, True])
def test_factors_in_fp32_are_lowered_to_an_input_of_16_bits_without_autocast_too(packed):
    _, model = blocks(packed=packed, dtype=torch.bfloat16)
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    layer, x = model.base_model.model.up_proj, torch.randn(4, 32).bfloat16()
    found = run(layer, x)
    model.zero_grad()
    expected = run(layer, x, True)
    assert found["out"].dtype == torch.bfloat16
    assert set(found) >= {"out", "x", "lora_A.default.weight", "lora_B.default.weight"}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_names_and_copies():
    plain, swapped = blocks()
    assert list(plain.state_dict()) == list(swapped.state_dict())
    run(swapped, torch.randn(2, 32), True)
    copied = copy.deepcopy(swapped)
    layer = copied.base_model.model.up_proj
    assert isinstance(layer, LoRALinear)
    assert layer._low is None


def test_operations_of_one_layer():
    """What a host starts for forward and backward of one layer under autocast, fewer than half of PEFT's."""
    plain, swapped = blocks(dtype=torch.bfloat16)
    x = torch.randn(4, 32).bfloat16()
    counts = []
    for model in (plain, swapped):
        run(model, x, True)
        layer, value = model.base_model.model.up_proj, x.clone().requires_grad_()
        model.zero_grad()
        with torch.profiler.profile() as profiler, torch.autocast("cpu", torch.bfloat16):
            layer(value).sum().backward()
        working = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::copy_", "aten::mul", "aten::add", "aten::add_"}
        counts.append(sum(event.count for event in profiler.key_averages() if event.key in working))
    assert counts[1] < 0.6 * counts[0]


# ------------------------------------------------------------------------------------ half precision around the factors


def test_factors_stay_in_fp32_when_the_model_becomes_bf16_and_are_lowered_for_the_product():
    plain, model = blocks()
    factors = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
    model._apply(keep_factors(model, lambda tensor: tensor.bfloat16()))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in factors else torch.bfloat16), name
    assert all(torch.equal(model.get_parameter(name), value) for name, value in factors.items())
    x, products = torch.randn(6, 32).bfloat16(), []
    layer = model.base_model.model.up_proj
    layer._lowered = lambda *args: products.append(args[2]) or LoRALinear._lowered(layer, *args)
    found = run(model, x)
    assert products == [torch.bfloat16]
    assert found["out"].dtype == torch.bfloat16
    exact = run(plain.double(), x.double())
    for name, value in found.items():
        if "lora_" in name:
            assert value.dtype == torch.float32
        assert float((value.double() - exact[name]).norm() / exact[name].norm()) < 0.02, name
    moved = keep_factors(model, lambda tensor: tensor.double())  # more bits are no rounding
    assert {p.dtype for p in model._apply(moved).parameters()} == {torch.float64}


def adamw(named):
    return torch.optim.AdamW(named, lr=1e-6)


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_adapters_of_a_bf16_run_realize_the_update_of_fp32(tmp_path, publish):
    twin = Twin(adamw)
    lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    _, module, data = fit(
        tmp_path,
        policy={"dtype": "bf16", "lora": lora, "gradient_checkpointing": True},
        optimizer=adamw,
        format="bf16",
        publisher={"lora": publish},
        callbacks=[twin],
        trainer={"precision": "bf16-true", "max_epochs": 3},
    )
    start = dict(zip(twin.named, twin.start.split([p.numel() for p in twin.named.values()]), strict=True))
    held = dict(module.named_parameters())
    for factor in ("lora_A", "lora_B"):
        names = [name for name in twin.named if factor in name]
        wanted = torch.cat([twin.named[name].detach().flatten() - start[name] for name in names])
        found = torch.cat([held[name].detach().flatten() - start[name] for name in names])
        assert float(found @ wanted / (wanted @ wanted)) == pytest.approx(1, abs=0.01)
    assert {p.dtype for name, p in held.items() if "lora_" not in name} == {torch.bfloat16}
    assert data.engine.version >= 2  # every publish was verified
