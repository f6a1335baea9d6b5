import torch

from lit_qrl.formats import fp8_block, fp8_row
from lit_qrl.formats.kernels import activations, dispatch
from lit_qrl.formats.numerics import E4M3_MAX
from tests.formats.oracle import bits, weights
from tests.triton_interpreter import everywhere


@everywhere
def test_tokens(device):
    from lit_qrl.formats.kernels import fp8_triton

    for dtype in (torch.bfloat16, torch.float32):
        for case in ("random", "zero_rows", "wide", "constant"):
            x = weights(dtype, (9, 200))[case]
            codes, scales = fp8_triton.e4m3_tokens(x.to(device))
            expected_codes, expected_scales = activations.e4m3_codes(x, (1, 200))
            assert torch.equal(scales.cpu(), expected_scales), (case, dtype)
            assert torch.equal(bits(codes.cpu()), bits(expected_codes)), (case, dtype)


@everywhere
def test_whole(device):
    from lit_qrl.formats.kernels import fp8_triton

    nan = torch.ones(3, 5000)
    nan[2, 4000] = float("nan")
    wide = weights(torch.float32, (9, 200))["wide"]
    cases = {"wide": wide, "many": torch.randn(3, 5000), "nan": nan, "zeros": torch.zeros(2, 8)}
    for dtype in (torch.bfloat16, torch.float32):
        for case, given in cases.items():
            x = given.to(dtype)
            codes, scale = fp8_triton.e4m3_whole(x.to(device))
            plain, expected = dispatch.e4m3_inputs(x, False)
            assert scale.shape == expected.shape == ()
            assert torch.equal(scale.cpu().nan_to_num(-1.0), expected.nan_to_num(-1.0)), (case, dtype)
            assert torch.equal(bits(codes.cpu()), bits(plain)) or case == "nan"


@everywhere
def test_blocks(device):
    from lit_qrl.formats.kernels import fp8_triton

    for dtype in (torch.bfloat16, torch.float32):
        for case in ("random", "zero_rows", "wide"):
            weight = weights(dtype, (200, 300))[case]
            codes, scales = fp8_triton.fp8_blocks(weight.to(device))
            expected = fp8_block.FP8Block().quantize(weight)
            # on CUDA the scales are made by a product, as torch divides there, which rounds some otherwise
            agree = scales.cpu().float() == expected.scales.float()
            assert agree.any(), (case, dtype)
            every = agree.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
            assert torch.equal(bits(codes.cpu())[every], bits(expected.codes)[every]), (case, dtype)


@everywhere
def test_rows(device):
    from lit_qrl.formats.kernels import fp8_triton

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((9, 200), (3, 5000)):  # a row in one piece, and in two
            for case, weight in weights(dtype, shape).items():
                codes, scales = fp8_triton.fp8_rows(weight.to(device))
                # as torch divides on CUDA, where a number divides by its inverse
                scale = (weight.abs().amax(dim=1, keepdim=True).float() * torch.tensor(1 / E4M3_MAX)).to(dtype)
                scale = torch.where(scale == 0, torch.finfo(dtype).eps, scale)
                assert torch.equal(bits(scales.cpu()), bits(scale)), (case, dtype)
                assert torch.equal(bits(codes.cpu()), bits(fp8_row.FP8Row().encode(weight / scale))), (case, dtype)
    nan = torch.ones(3, 5000)
    nan[1, 4999], nan[2, 0] = float("nan"), float("inf")
    found = fp8_triton.fp8_rows(nan.to(device))[1].flatten().isfinite()
    assert found.tolist() == [True, False, False]
