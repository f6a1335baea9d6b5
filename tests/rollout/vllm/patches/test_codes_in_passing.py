from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_qrl.rollout.vllm.patches import codes_in_passing


class RMSNorm(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(0.5, 1.5, k)), 1e-6
        self.variance_size_override, self.has_weight = None, True


class SiluAndMul(nn.Module):
    pass


class CutlassFp8BlockScaledMMKernel:
    quant_fp8 = SimpleNamespace(static=False, is_group_quant=True, use_per_token_if_dynamic=False)


class CutlassFP8ScaledMMLinearKernel:
    def __init__(self, token):
        self.quant_fp8 = SimpleNamespace(static=False, is_group_quant=False, use_per_token_if_dynamic=token)


class Qwen2DecoderLayer(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(128), RMSNorm(128)
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.mlp.act_fn = SiluAndMul()
        for parent, name in ((self.self_attn, "qkv_proj"), (self.mlp, "gate_up_proj"), (self.mlp, "down_proj")):
            setattr(parent, name, nn.Module())
            getattr(parent, name).scheme = SimpleNamespace(fp8_linear=kernel)


class OtherDecoderLayer(Qwen2DecoderLayer):
    pass


def marks(layer):
    makers = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp.act_fn
    return [getattr(maker, "_lit_qrl_codes_by_row", None) for maker in makers]


def test_makers_know_the_scales_of_the_layer_that_reads_them():
    blocks, rows = (
        Qwen2DecoderLayer(CutlassFp8BlockScaledMMKernel()),
        Qwen2DecoderLayer(CutlassFP8ScaledMMLinearKernel(token=True)),
    )
    tensors = Qwen2DecoderLayer(CutlassFP8ScaledMMLinearKernel(token=False))
    plain, other = Qwen2DecoderLayer(None), OtherDecoderLayer(CutlassFp8BlockScaledMMKernel())
    model = nn.ModuleList([blocks, rows, tensors, plain, other])
    seen = []
    codes_in_passing._marking(lambda *given: seen.append(given))(model, "config", "device")
    assert seen == [(model, "config", "device")]
    assert marks(blocks) == [False] * 3
    assert marks(rows) == [True] * 3
    assert marks(tensors) == marks(plain) == marks(other) == [None] * 3


def test_without_a_mark_or_a_gpu_vllm_s_operators_do_it():
    seen = []
    norm, gate = RMSNorm(128), SiluAndMul()
    x = torch.randn(2, 128).bfloat16()
    ours = codes_in_passing._norm(lambda *given: seen.append(given))
    for _ in range(2):
        ours(norm, x, None)
        codes_in_passing._gated(lambda *given: seen.append(given))(gate, x)
        norm._lit_qrl_codes_by_row = gate._lit_qrl_codes_by_row = True  # still on a CPU
    assert len(seen) == 4


def test_a_layer_takes_the_codes_that_came_with_its_input():
    seen = []
    kernel = SimpleNamespace(
        config=SimpleNamespace(out_dtype=None),
        _get_layer_params=lambda layer: (layer.weight, layer.weight_scale, None, None),
        apply_scaled_mm=lambda **given: given,
    )
    layer = SimpleNamespace(weight=torch.ones(128, 256), weight_scale=torch.ones(256, 1))
    apply = codes_in_passing._by_row(lambda *given: seen.append(given))
    x, codes, scales = torch.randn(3, 128).half(), torch.randn(3, 128), torch.ones(3, 1)
    apply(kernel, layer, x)
    assert len(seen) == 1
    given = apply(kernel, layer, codes_in_passing._with_codes((x, codes, scales)), bias=None)
    assert len(seen) == 1
    assert given["A"] is codes
    assert given["As"] is scales
    assert given["B"] is layer.weight
    assert given["Bs"] is layer.weight_scale
    assert given["out_dtype"] == torch.float16
    assert given["output_shape"] == [3, 256]


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [True, False])
def test_codes_travel_with_the_numbers_that_they_are_of(by_row, monkeypatch):
    monkeypatch.setattr(codes_in_passing, "_invariant", lambda: False)
    norm, gate = RMSNorm(256).bfloat16().cuda(), SiluAndMul()
    norm._lit_qrl_codes_by_row = gate._lit_qrl_codes_by_row = by_row
    x, residual = torch.randn(2, 9, 256, device="cuda", dtype=torch.bfloat16)
    held = residual.clone()
    with torch.inference_mode():
        y, total = codes_in_passing._norm(lambda *given: pytest.fail("vLLM's own"))(norm, x, held)
        assert total is held
        assert torch.equal(held, x + residual)
        expected = F.rms_norm((x + residual).float(), (256,), None, 1e-6).bfloat16() * norm.weight
        made = codes_in_passing._gated(lambda *given: pytest.fail("vLLM's own"))(gate, x)
    silu = F.silu(x[:, :128]) * x[:, 128:]
    for out, plain in ((y, expected), (made, silu)):
        torch.testing.assert_close(out, plain, rtol=2**-7, atol=0)
        codes, scales = codes_in_passing.kept_codes(out)
        assert scales.shape == (9, 1 if by_row else out.shape[1] // 128)
        wide = scales.expand(9, 1) if by_row else scales.repeat_interleave(128, 1)
        torch.testing.assert_close(codes.float() * wide, out.float(), rtol=2**-3, atol=2**-8)
