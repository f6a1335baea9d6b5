"""The modules around the one-pass kernels, on a CPU: stand-ins of the kernels made of plain operations."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats.kernels import dispatch, gemm
from lit_qrl.formats.kernels.activations import e4m3_codes
from lit_qrl.precision import QATAligned, UnifiedFP8
from lit_qrl.precision.layers import block_fp8, one_pass
from lit_qrl.precision.layers.low_bit import LowBitLinear
from lit_qrl.precision.layers.one_pass import OnePassGatedMLP, OnePassRMSNorm, take_one_pass
from tests.precision.toy import LINEARS, network

SIZES = {
    "vocab_size": 32, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip


def wide(kind=Qwen3ForCausalLM, config=Qwen3Config, **changes):
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **changes}, attn_implementation="sdpa"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def tiles(x, rows, columns, before=0, other=None, rstd=None, weight=None, written=True):
    made = x
    if before == 1:
        made = weight * (x.float() * rstd[:, None]).to(x.dtype)
    if before == 2:
        made = F.silu(x) * other
    along, across = dispatch.e4m3_tiles(made, rows, columns)
    return made if written else torch.full((), torch.nan).expand(made.shape), along, across


def norm(x, weight, eps, residual=None, scale=True, extent=0):
    h = x if residual is None else residual + x
    rstd = torch.rsqrt(h.float().pow(2).mean(-1) + eps)
    y = weight * (h.float() * rstd[:, None]).to(h.dtype)
    return h, y, rstd, e4m3_codes(y, (1, extent)) if extent > 0 else None


def norm_backward(grad, x, rstd, weight, beside=None):
    unit = x.float() * rstd[:, None]
    scaled = grad.float() * weight.float()
    grad_x = (scaled - unit * (scaled * unit).mean(-1, keepdim=True)) * rstd[:, None]
    grad_x = grad_x if beside is None else grad_x + beside.float()
    return grad_x.to(x.dtype), (grad.float() * unit).sum(0)


def gated_backward(grad, gate, up, again=False):
    sigmoid = torch.sigmoid(gate.float())
    slope = sigmoid * (1 + gate.float() * (1 - sigmoid))
    made = (grad.float() * up * slope).to(gate.dtype), (grad.float() * F.silu(gate.float())).to(up.dtype)
    if again:
        grad.copy_(F.silu(gate) * up)
    return made


@pytest.fixture
def kernels(monkeypatch):
    return stand_in(monkeypatch)


def stand_in(monkeypatch):
    from lit_qrl.formats import kernels

    calls = []
    modules = {
        "tiles_triton": SimpleNamespace(
            tiles=lambda *a, **o: calls.append((a[1], o)) or tiles(*a, **o),
            gated_backward=gated_backward, NORM=1, GATED=2,
        ),
        "norm_triton": SimpleNamespace(
            norm=lambda *a, **o: calls.append(("norm", {})) or norm(*a, **o), norm_backward=norm_backward,
        ),
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, f"lit_qrl.formats.kernels.{name}", module)
        monkeypatch.setattr(kernels, name, module, raising=False)
    monkeypatch.setattr(one_pass, "_in_one_pass", lambda kernel, codes, x, *others: not x.is_inference())
    return calls


def run(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.float().logsumexp(-1).square().mean().backward()
    return logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("quantized", [False, True])
def test_the_modules_keep_names_and_numbers_without_the_kernels(quantized):
    plain, model = wide(), wide()
    keys = list(model.state_dict())
    assert take_one_pass(model, "auto") == take_one_pass(model, False) == []
    for _ in range(2):  # the second changes nothing
        if quantized:
            plugin = UnifiedFP8("emulate", fuse=True)
            plugin.convert_module(model)
            assert sorted(plugin.layers(model)) == sorted(LINEARS)
            UnifiedFP8("emulate").convert_module(plain)
        else:
            take_one_pass(model, True)
        assert list(model.state_dict()) == keys
        norms = [m for m in model.modules() if isinstance(m, OnePassRMSNorm)]
        assert len(norms) == (4 if quantized else 5)
        assert len([m for m in model.modules() if isinstance(m, OnePassGatedMLP)]) == 2
    tokens = torch.arange(12).view(2, 6)
    (logits, gradients), (expected, others) = run(model, tokens), run(plain, tokens)
    assert torch.equal(logits, expected)
    assert all(torch.equal(gradients[name], others[name]) for name in others)
    assert copy.deepcopy(model)(input_ids=tokens).logits.shape == logits.shape


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_codes_of_the_kernel_are_those_that_the_layers_multiply(kind, kernels, monkeypatch):
    made = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}[kind]
    plain, model = wide(*made), wide(*made)
    UnifiedFP8("emulate").convert_module(plain)
    UnifiedFP8("emulate", fuse=True).convert_module(model)

    # the backend that reads tiles as they are, with the emulation's product
    class Backend(block_fp8.Emulated):
        name = "torch"
        inputs, quantize = block_fp8.Torch.inputs, block_fp8.Torch.quantize

    for layer in model.modules():
        if isinstance(layer, LowBitLinear):
            layer.arithmetic.take(Backend())
    quantized = []
    original = dispatch.e4m3_tiles
    monkeypatch.setattr(dispatch, "e4m3_tiles", lambda *a: quantized.append(1) or original(*a))
    tokens = torch.arange(12).view(2, 6)
    (logits, gradients), (expected, others) = run(model, tokens), run(plain, tokens)
    assert torch.equal(logits, expected)
    assert (
        len([made for made, _ in kernels if made != "norm"]) == 6
    )  # two norms and one activation in each of two layers
    assert [made.get("written") for _, made in kernels if "written" in made] == [False] * 2  # what `down` reads
    # what attention hands to its output projection by itself, and in the backward pass each layer's gradient
    assert len(quantized) == 6 + 2 + 14
    for name, gradient in others.items():
        # the codes of a gradient may move where its last bits did
        assert (gradients[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-7, name


def test_what_somebody_else_reads_is_written(kernels):
    model = wide()
    UnifiedFP8("emulate", fuse=True).convert_module(model)
    mlp = model.model.layers[0].mlp
    gate, up = torch.randn(2, 128), torch.randn(2, 128)
    assert not mlp._by_codes_alone(gate)  # the emulation reads the input itself
    mlp.down_proj.arithmetic.take(SimpleNamespace(name="torch"))
    assert mlp._by_codes_alone(gate)
    assert mlp.hidden(gate, up, read=False).isnan().all()
    assert torch.equal(mlp.hidden(gate, up), F.silu(gate) * up)
    with torch.autocast("cpu", torch.bfloat16):  # of which the layer would make another tensor
        assert not mlp._by_codes_alone(gate)
        assert mlp._by_codes_alone(gate.bfloat16())
    hook = mlp.down_proj.register_forward_pre_hook(lambda module, inputs: None)
    assert not mlp._by_codes_alone(gate)
    hook.remove()
    mlp.columns = False  # the gradient's codes would be made of it
    assert not mlp._by_codes_alone(gate)


def test_a_tensor_that_is_written_to_is_quantized_anew():
    x = torch.randn(4, 128)
    inputs = dispatch.kept_tiles
    first, _ = inputs(x, columns=False)
    assert inputs(x, columns=False)[0] is first
    along, across = inputs(x, columns=True)  # the transpose was not there yet
    assert across is not None
    assert inputs(x, columns=False)[0] is along
    x.mul_(2.0)
    assert inputs(x, columns=False)[0] is not along
    assert torch.equal(inputs(x, columns=False)[0][1], along[1] * 2)
    with torch.inference_mode():
        y = torch.randn(4, 128)
        assert inputs(y, columns=False)[0] is not inputs(y, columns=False)[0]


def test_layers_that_read_one_tensor_quantize_it_once(monkeypatch):
    calls = []
    original = block_fp8.Emulated.quantize
    monkeypatch.setattr(block_fp8.Emulated, "quantize", lambda self, *a: calls.append(a[1:]) or original(self, *a))
    model = network()
    UnifiedFP8("emulate").convert_module(model)
    model(input_ids=torch.arange(6)[None], use_cache=False)
    assert len(calls) == 2 * 4  # q k v, o, gate up, down
    calls.clear()
    with torch.no_grad():
        model(input_ids=torch.arange(6)[None], use_cache=False)
    assert set(calls) == {(True, False)}  # nothing is kept for a backward pass that will not come


def test_what_cannot_be_done_in_one_pass_is_refused():
    with pytest.raises(ConfigError, match=r"not quantized per 1×128.*fp8_block"):
        QATAligned("int4_group", fuse=True)
    with pytest.raises(ConfigError, match="No norm or MLP before a quantized layer"):
        UnifiedFP8("emulate", fuse=True).convert_module(nn.Sequential(nn.Linear(128, 128)))
    model = wide(hidden_act="gelu")
    QATAligned(formats.FP8Block(), fuse=True).convert_module(model)
    assert not any(isinstance(part, OnePassGatedMLP) for part in model.modules())  # GELU is not SiLU


def test_blocks_take_one_pass_by_themselves_where_the_kernels_run(monkeypatch):
    def replaced_parts(plugin, model):
        plugin.convert_module(model)
        return sum(isinstance(part, OnePassRMSNorm | OnePassGatedMLP) for part in model.modules())

    assert replaced_parts(QATAligned("fp8_block"), wide()) == 0  # no such device here
    monkeypatch.setattr(one_pass, "kernels_here", lambda: True)
    assert replaced_parts(QATAligned("fp8_block"), wide()) == 6
    assert replaced_parts(QATAligned("fp8_block", fuse=False), wide()) == 0
    assert replaced_parts(QATAligned("fp8_row"), wide()) == 0
    # blocks that are not known stay as they are, and nothing is refused
    assert replaced_parts(QATAligned("fp8_block"), nn.Sequential(nn.Linear(128, 128))) == 0
    assert replaced_parts(UnifiedFP8("emulate"), wide()) == 0
    monkeypatch.setattr(block_fp8, "_block_gemm_missing", lambda device: None)
    monkeypatch.setattr(block_fp8, "_te_missing", lambda: None)
    plugin = UnifiedFP8()
    assert replaced_parts(plugin, wide(head_dim=128)) == 6
    assert plugin.backend.name == "torch"
    assert replaced_parts(UnifiedFP8("torch", fuse=False), wide(head_dim=128)) == 0
    monkeypatch.setattr(block_fp8, "TransformerEngine", block_fp8.Emulated)
    plugin = UnifiedFP8(fuse=False)
    plugin.convert_module(wide(head_dim=128))
    assert type(plugin.backend) is block_fp8.Emulated


def test_plain_blocks_take_one_kernel_each_and_keep_their_numbers(kernels):
    plain, model = wide(), wide()
    keys = list(model.state_dict())
    names = take_one_pass(model, True)
    assert len(names) == 7  # two norms and an MLP in each of two layers, and the last norm
    assert take_one_pass(model, True) == []
    assert list(model.state_dict()) == keys
    for one in (plain, model):
        one.model.layers[0].input_layernorm.weight.requires_grad_(False)
        one.model.norm.weight.requires_grad_(False)
    tokens = torch.arange(12).view(2, 6)
    (expected, others), (logits, gradients) = run(plain, tokens), run(model, tokens)
    assert torch.equal(logits, expected)
    assert [made for made, _ in kernels].count("norm") == 5
    assert [o.get("other") is not None for _, o in kernels].count(True) == 2
    torch.testing.assert_close(gradients, others, rtol=1e-3, atol=1e-6)


def test_plain_blocks_stand_under_an_adapter_and_over_weights_that_are_drawn_later(tmp_path):
    from peft import LoraConfig

    from lit_qrl.policy import CausalPolicy
    from lit_qrl.precision import NVFP4LoRA
    from tests.tiny_run import model_folder

    lora = LoraConfig(r=4, target_modules="all-linear")
    policy = CausalPolicy(model_folder(tmp_path), lora=lora, random_weights=True, fuse=True)
    plugin = NVFP4LoRA()
    with plugin.module_init_context():
        policy.configure()
    plugin.configure_policy(policy)
    norms = [part for part in policy.network.modules() if isinstance(part, OnePassRMSNorm)]
    assert len(norms) == 5 + 4  # two layers' own two and those of heads, and the last
    assert all(torch.equal(norm.weight, torch.ones_like(norm.weight)) for norm in norms)
    assert sum(isinstance(part, OnePassGatedMLP) for part in policy.network.modules()) == 2


@pytest.mark.parametrize(
    ("capability", "codes", "fuses"), [((8, 0), True, False), ((8, 0), False, True), ((8, 9), True, True)]
)
def test_blocks_keep_codes_only_on_a_gpu_that_knows_fp8(capability, codes, fuses, monkeypatch):
    monkeypatch.setattr(gemm, "capability", lambda index: capability)
    monkeypatch.setattr(dispatch, "triton_installed", lambda kernel: True)
    device, shape = torch.device("cuda", 0), (4, 128)
    x = SimpleNamespace(device=device, dtype=torch.bfloat16, shape=shape, is_inference=lambda: False)
    assert one_pass._in_one_pass("norm", codes, x, x) is fuses
