from types import SimpleNamespace

import pytest
import torch

from lit_qrl.formats.kernels import activations, dispatch, gemm


@pytest.mark.parametrize("tokens", [1, 128, 150])
def test_tiles_along_and_across(tokens):
    torch.manual_seed(0)
    x = torch.randn(tokens, 256) * torch.rand(1, 256)
    (codes, scale), (codes_t, scale_t) = dispatch.e4m3_tiles(x, rows=True, columns=True)
    padded = -(-tokens // 128) * 128
    assert codes.shape == (tokens, 256)
    assert scale.shape == (tokens, 2)
    assert codes_t.shape == (256, padded)
    assert scale_t.shape == (256, padded // 128)
    assert not codes_t.float()[:, tokens:].any()
    for i in range(0, tokens, 7):
        assert scale[i, 1] == x[i, 128:].abs().max() / 448
        assert torch.equal(codes[i, 128:].float(), (x[i, 128:] / scale[i, 1]).to(torch.float8_e4m3fn).float())
    for j in range(0, 256, 17):
        assert scale_t[j, 0] == x[:128, j].abs().max() / 448
        assert torch.equal(
            codes_t[j, : min(tokens, 128)].float(), (x[:128, j] / scale_t[j, 0]).to(torch.float8_e4m3fn).float()
        )


def test_only_what_was_asked_for_is_made():
    x = torch.randn(4, 128)
    assert dispatch.e4m3_tiles(x, rows=True, columns=False)[1] is None
    assert dispatch.e4m3_tiles(x, rows=False, columns=True)[0] is None


def test_without_a_gpu_there_is_no_kernel():
    weight = torch.randn(8, 128)
    if not weight.is_cuda:
        assert dispatch.fp8_weights(weight, "fp8_rows") is None
        assert dispatch.int4_groups(weight, 32) is None
        assert not dispatch.available(weight, "values")


@pytest.mark.parametrize(("capability", "known"), [((8, 0), False), ((8, 9), True)])
def test_kernels_of_e4m3_need_a_gpu_that_knows_it(capability, known, monkeypatch):
    monkeypatch.setattr(gemm, "capability", lambda index: capability)
    monkeypatch.setattr(dispatch, "triton_installed", lambda kernel: True)
    weight = SimpleNamespace(device=torch.device("cuda", 0))
    assert dispatch.available(weight, "values")
    assert dispatch.available_for_e4m3(weight, "tiles") is known
    if not known:  # Triton would not compile them
        assert dispatch.fp8_weights(weight, "fp8_rows") is None


def test_tokens_and_whole():
    x = torch.randn(4, 128)
    codes, scale = dispatch.e4m3_inputs(x, per_token=True)
    assert torch.equal(scale, x.abs().amax(dim=1, keepdim=True) / 448)
    assert torch.equal(codes.float(), activations.e4m3_rounded(x, (1, 128))[0])
    codes, scale = dispatch.e4m3_inputs(x, per_token=False)
    assert scale == x.abs().max() / 448
    assert codes.float().abs().max() == 448


@pytest.mark.parametrize("shape", [(1, 5), (128, 256), (130, 70)])
def test_codes_are_transposed_in_one_piece(shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    turned = dispatch.transposed(codes)
    assert turned.is_contiguous()
    assert turned.dtype == codes.dtype
    assert torch.equal(turned.view(torch.uint8), codes.view(torch.uint8).t())


def test_what_is_kept_for_a_tensor_goes_with_it_and_is_no_attribute():
    before = len(dispatch._notes)
    x, asked = torch.randn(4, 8), []
    for _ in range(2):
        assert dispatch.made_once(x, "made", False, lambda columns: (asked.append(1) or "it", None)) == ("it", None)
    assert len(asked) == 1
    assert not vars(x)
    assert dispatch.kept(x, "another") is dispatch.kept(x.view(-1), "made") is None
    x.add_(1)
    assert dispatch.kept(x, "made") is None
    del x
    assert len(dispatch._notes) == before
