from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.patches import block_products


def layer_of(n, k, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scale = (torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.5).to(dtype)
    return SimpleNamespace(weight=weight.to(device), weight_scale=scale.to(device))


def quantized(x, *_):
    tiles = x.float().unflatten(-1, (-1, 128))
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    return (tiles / scale).flatten(-2).to(torch.float8_e4m3fn), scale.squeeze(-1)


def exact(codes, scales, layer, bias):
    """The product in fp64."""
    wide = layer.weight_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    out = (codes.double() * scales.double().repeat_interleave(128, 1)) @ (layer.weight.double() * wide).T
    return out if bias is None else out + bias.double()


def patched(original):
    return block_products._blocks(original), SimpleNamespace(
        quant_fp8=quantized, config=SimpleNamespace(out_dtype=torch.bfloat16)
    )


def test_what_our_kernel_does_not_multiply_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr(block_products, "_here", lambda: True)
    monkeypatch.setattr(block_products, "_invariant", lambda: False)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    plain = layer_of(256, 384)
    assert block_products.takes(on_gpu, plain.weight, plain.weight_scale)
    refused = [
        (SimpleNamespace(device=torch.device("cpu")), plain.weight, plain.weight_scale),
        (on_gpu, *vars(layer_of(250, 384)).values()),  # a partial block
        (on_gpu, *vars(layer_of(256, 384, dtype=torch.bfloat16)).values()),
        (on_gpu, plain.weight.t(), plain.weight_scale),
    ]
    assert not any(block_products.takes(*one) for one in refused)
    monkeypatch.setattr(block_products, "_invariant", lambda: True)
    assert not block_products.takes(on_gpu, plain.weight, plain.weight_scale)


def test_a_scale_that_is_of_no_whole_blocks_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr(block_products, "takes", lambda *given: True)
    seen = []
    apply, kernel = patched(lambda *given, **named: seen.append(given))
    layer, x = layer_of(256, 384), torch.randn(3, 384)
    for scale in (layer.weight_scale.t().contiguous().t(), layer.weight_scale[:, :1], None):
        apply(kernel, SimpleNamespace(weight=layer.weight, weight_scale=scale), x)
    assert len(seen) == 3


def test_a_layer_that_is_left_to_vllm_gets_what_it_was_given():
    seen = []
    apply, kernel = patched(lambda *given, **named: seen.append((given, named)))
    layer, x, bias = layer_of(256, 384), torch.randn(3, 384), torch.randn(256)
    apply(kernel, layer, x, bias, other=1)
    assert seen[0][1] == {"other": 1}
    assert [a is b for a, b in zip(seen[0][0], (kernel, layer, x, bias), strict=True)] == [True] * 4


def test_codes_and_scales_reach_the_product_with_their_layer_s(monkeypatch):
    monkeypatch.setattr(block_products, "takes", lambda *given: True)

    def multiplied(codes, scales, weight, block_scales, bias, dtype):
        given = SimpleNamespace(weight=weight, weight_scale=block_scales)
        return exact(codes, scales, given, bias).to(dtype)

    monkeypatch.setattr(block_products, "by_blocks", multiplied)
    apply, kernel = patched(lambda *given, **named: pytest.fail("vLLM's own"))
    x, bias = torch.randn(2, 3, 384), torch.randn(256)
    for name in ("weight_scale", "weight_scale_inv"):  # compressed-tensors' name, and that of vLLM's own FP8 folders
        made = layer_of(256, 384)
        layer = SimpleNamespace(weight=made.weight, **{name: made.weight_scale})
        out = apply(kernel, layer, x, bias)
        assert out.shape == (2, 3, 256)
        assert out.dtype == torch.bfloat16
        expected = exact(*quantized(x.view(-1, 384)), made, bias).view(2, 3, 256)
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-3)


def test_the_compiler_sees_one_operator():
    operator = block_products._operator()
    layer = layer_of(256, 384)
    codes, scales = quantized(torch.randn(5, 384))
    with torch._subclasses.FakeTensorMode() as mode:
        given = [mode.from_tensor(one) for one in (codes, scales, layer.weight, layer.weight_scale)]
        out = operator(*given, None, torch.bfloat16)
    assert (out.shape, out.dtype) == ((5, 256), torch.bfloat16)


def check(out, expected):
    assert (out.double() - expected).abs().max() < 2**-7 * expected.abs().max()
    assert (out.double() - expected).square().mean().sqrt() < 2**-8 * expected.square().mean().sqrt()


SHAPES = ((4608, 3584, True), (3584, 3584, False), (1024, 18944, False), (37888, 512, False), (1536, 8960, True))


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("rows", [1, 7, 16, 64, 128, 130, 300, 512, 2000])
def test_products_by_blocks_are_those_of_fp64_and_of_vllm_s_kernel(rows):
    from vllm import _custom_ops as ops

    apply, kernel = patched(lambda *given, **named: pytest.fail("vLLM's own"))

    def by_columns(x, *_):
        codes, scales = quantized(x)
        return codes, scales.t().contiguous().t()

    kernel.quant_fp8 = by_columns
    for n, k, biased in SHAPES:
        layer = layer_of(n, k, "cuda")
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if biased else None
        out = apply(kernel, layer, x, bias)
        codes, scales = by_columns(x)
        check(out, exact(codes, scales, layer, bias))
        across = layer.weight_scale.t()
        theirs = ops.cutlass_scaled_mm(codes, layer.weight.t(), scale_a=scales, scale_b=across, out_dtype=out.dtype)
        check(out, (theirs if bias is None else theirs + bias).double())


@pytest.mark.gpu
@pytest.mark.vllm
def test_a_recorded_product_repeats_itself():
    apply, kernel = patched(lambda *given, **named: pytest.fail("vLLM's own"))
    layer = layer_of(3584, 3584, "cuda")
    x = torch.randn(48, 3584, device="cuda", dtype=torch.bfloat16)
    first = apply(kernel, layer, x).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply(kernel, layer, x)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)
    x.mul_(2)  # a power of two changes scales alone
    graph.replay()
    assert torch.equal(out, 2 * first)
