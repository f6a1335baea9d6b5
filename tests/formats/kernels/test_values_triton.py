import torch

from lit_qrl import formats
from lit_qrl.formats import Int4Group
from tests.formats.oracle import bits, weights
from tests.triton_interpreter import everywhere


@everywhere
def test_int4(device):
    from lit_qrl.formats.kernels import values_triton

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for case, weight in weights(dtype, (64, 64)).items():
            expected = Int4Group(32).quantize(weight)
            codes, scales = values_triton.int4_groups(weight.to(device), 32)
            # on CUDA the scales are made by a product, as torch divides there, which rounds some otherwise
            agree = scales.cpu() == expected.scales
            assert agree.any(), case
            same = codes.cpu().view(*agree.shape, -1) == expected.codes.view(*agree.shape, -1)
            assert same[agree].all(), (case, dtype)


@everywhere
def test_values(device):
    from lit_qrl.formats.kernels import values_triton

    kinds = {
        "int4_group": (values_triton.INT4, {"group_size": 32}, 32),
        "mxfp4": (values_triton.FP4, {}, 32),
        "nvfp4": (values_triton.FP4, {}, 16),
    }
    for name, (kind, options, per_scale) in kinds.items():
        format = formats.get(name, **options)
        for case in ("random", "zero_rows", "wide"):
            q = format.quantize(weights(torch.bfloat16, (32, 64))[case])
            if name == "mxfp4":
                q.scales[0, :2] = torch.tensor([0, 255])  # the smallest, which is subnormal, and NaN
            packed, scales = (tensor.to(device) for tensor in (q.codes, q.scales))
            divisor = None if q.global_scale is None else q.global_scale.to(device).reshape(1)
            for dtype in (torch.float32, torch.bfloat16):
                made = values_triton.values(packed, scales, per_scale, kind, q.shape, dtype, divisor=divisor)
                found, wanted = made.cpu(), format.dequantize(q, dtype)
                assert torch.equal(found.isnan(), wanted.isnan())  # of which a device has bits of its own
                assert torch.equal(bits(found.nan_to_num(0.0)), bits(wanted.nan_to_num(0.0))), (name, case, dtype)


@everywhere
def test_stacks(device):
    from lit_qrl.formats.kernels import values_triton

    format, generator = formats.get("nvfp4"), torch.Generator().manual_seed(0)
    stack = torch.randn(3, 40, 80, generator=generator).bfloat16() * torch.tensor([1.0, 30.0, 0.1]).view(3, 1, 1)
    q = format.quantize_stack(stack)
    held = [tensor.to(device) for tensor in (q.codes, q.scales, q.global_scale)]
    made = values_triton.values(*held[:2], 16, values_triton.FP4, stack.shape, torch.float32, divisor=held[2])
    assert torch.equal(bits(made.cpu()), bits(format.dequantize_stack(q)))


@everywhere
def test_scaled(device):
    from lit_qrl.formats.kernels import values_triton

    for name in ("fp8_row", "fp8_tensor", "fp8_block", "int8_channel"):
        format = formats.get(name)
        for shape in ((6, 72), (130, 2184)):
            q = format.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
            for dtype in (torch.float32, torch.bfloat16):
                made = values_triton.scaled_values(q.codes.to(device), q.scales.to(device), dtype, format.extent(shape))
                assert torch.equal(bits(made.cpu()), bits(format.dequantize(q, dtype))), (name, shape, dtype)


@everywhere
def test_scaled_inputs(device):
    from lit_qrl.formats.kernels import values_triton

    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for format in (formats.get("fp8_row"), formats.get("fp8_tensor"), formats.get("fp8_block")):
        codes, scale = format.input_codes(x)
        column_by_column = scale.to(device).t().contiguous().t() if scale.ndim else scale.to(device)
        block = format.input_extent(x.shape)
        made = values_triton.scaled_values(codes.to(device), column_by_column, torch.bfloat16, block)
        assert torch.equal(bits(made.cpu()), bits(format.dequantized_kept((codes.cpu(), scale.cpu()), torch.bfloat16)))
