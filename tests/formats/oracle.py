"""The oracle of the format tests: what compressed-tensors makes of a weight, and a GEMM in fp64."""

import bisect

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

SHAPE = (256, 384)
# The finite numbers of E4M3, from their bits: 4 of the exponent with bias 7, 3 of the mantissa; the last code is NaN.
E4M3 = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** max(e - 7, -6) for e in range(16) for m in range(8)][:-1]


def nearest(values: list[float], x: float) -> int:
    """Return the place of the nearest of sorted numbers, of two as near the even place."""
    at = min(bisect.bisect_left(values, x), len(values) - 1)
    return min(range(max(at - 1, 0), at + 1), key=lambda i: (abs(values[i] - x), i % 2))


def weights(dtype: torch.dtype, shape: tuple[int, int] = SHAPE) -> dict[str, Tensor]:
    """Return the weights that every format is tried on."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(shape, generator=generator)
    uniform = torch.rand(shape, generator=generator)
    heavy = normal / uniform.clamp_min(1e-4) ** 1.5  # tails like a ratio distribution's: a few huge weights
    zero_rows = normal.clone()
    zero_rows[: shape[0] // 2] = 0
    tiny = torch.finfo(dtype).tiny
    cases = {
        "random": normal * 0.02,
        "heavy_tailed": heavy.clamp(-1e4, 1e4),
        "constant": torch.full(shape, -0.3),
        "all_zero": torch.zeros(shape),
        "zero_rows": zero_rows,
        "subnormal": normal * tiny / 8,
        "near_underflow": normal * tiny * 300,
        "wide": normal * 10 ** (uniform * 6 - 5),
        "grid": torch.arange(shape[0] * shape[1]).reshape(shape).remainder(33).float() - 16,
    }
    return {name: case.to(dtype) for name, case in cases.items()}


def args(num_bits: int, type: str, strategy: str, **options: object) -> QuantizationArgs:
    """Return compressed-tensors' description of a symmetric static weight quantization."""
    return QuantizationArgs(num_bits=num_bits, type=type, strategy=strategy, symmetric=True, **options)


def compressed(weight: Tensor, description: QuantizationArgs, dims: tuple[int, ...], cut: Tensor) -> tuple:
    """Return (codes before packing, scales, global scale) by compressed-tensors.

    `cut` is the weight reshaped so that the dimensions `dims` are reduced to one scale.
    """
    two_level = description.strategy == "tensor_group"
    global_scale = generate_gparam(weight.amin(), weight.amax()) if two_level else None
    lowest, highest = cut.amin(dim=dims), cut.amax(dim=dims)
    scale, zero_point = calculate_qparams(lowest, highest, description, global_scale=global_scale)
    if description.strategy == "channel":
        scale, zero_point = scale.reshape(-1, 1), zero_point.reshape(-1, 1)
    codes = quantize(weight, scale, zero_point, description, global_scale=global_scale)
    return codes, scale, global_scale


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, so that −0 and +0 differ and NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """True when dtype, shape and every bit agree."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(bits(ours), bits(theirs))


def gemm64(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + b in fp64."""
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


def ulps(ours: Tensor, exact: Tensor, absolute: Tensor) -> Tensor:
    """Return the distance to `exact` in units of ours' last place; where terms cancel, of `absolute`'s fp32 error.

    `absolute` is sum |x w| per output: below 2^-20 of it, fp32 accumulation has no bf16 digits to give.
    """
    eps = torch.finfo(ours.dtype).eps
    unit = torch.maximum(exact.abs() * eps, absolute * 2.0**-20)
    return (ours.double() - exact).abs() / unit.clamp_min(1e-300)


def rounded(x: Tensor, kind: str | None) -> Tensor:
    """Return inputs "m k" as a GEMM reads them whose scales are per `tensor`, `token`, `group` or, `int8`, token."""
    if kind == "group":
        return rounded_groups(x)
    out = x.double()
    for i in range(len(x) if kind else 0):
        amax = (x if kind == "tensor" else x[i]).float().abs().max()
        if kind == "int8":
            out[i] = torch.round(x[i].float() / (amax / 127)).double() * (amax / 127).double()
        else:
            out[i] = (x[i].float() / (amax / 448)).to(torch.float8_e4m3fn).double() * (amax / 448).double()
    return out


def rounded_groups(matrix: Tensor) -> Tensor:
    """Return each 1×128 of a matrix in E4M3, in a loop, fp64."""
    out = torch.empty(matrix.shape, dtype=torch.float64)
    for i in range(matrix.shape[0]):
        for start in range(0, matrix.shape[1], 128):
            part = matrix[i, start : start + 128].float()
            scale = part.abs().max() / 448.0
            codes = (part / scale).to(torch.float8_e4m3fn) if scale > 0 else torch.zeros_like(part)
            out[i, start : start + 128] = codes.double() * scale.double()
    return out


def rounded_blocks(weight: Tensor) -> Tensor:
    """Return each 128×128 of a weight in E4M3, in a loop, fp64."""
    out = torch.empty(weight.shape, dtype=torch.float64)
    for i in range(0, weight.shape[0], 128):
        for j in range(0, weight.shape[1], 128):
            part = weight[i : i + 128, j : j + 128]
            scale = part.abs().max() / 448.0
            out[i : i + 128, j : j + 128] = (part / scale).to(torch.float8_e4m3fn).double() * scale.double()
    return out
