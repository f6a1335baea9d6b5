"""What the formats share: scales as compressed-tensors computes them, roundings, and the packing of 4-bit codes.

Weights are quantized in their own dtype, as compressed-tensors does: for a bf16 weight the scale is a bf16 number and
the quotient is rounded to bf16 before it is rounded to the format.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.errors import ConfigError

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Halfway between the largest and the smallest signed code: compressed-tensors divides the whole range -2^(n-1) …
# 2^(n-1) - 1 by two, so that +amax saturates by half a step.
INT8_STEPS, INT4_STEPS = 127.5, 7.5
INT4_MIN, INT4_MAX = -8, 7
FP4_MAX = 6.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints of FP4_VALUES, each with True where a tie goes down to the even code.
_FP4_TIES = ((0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True))

# An fp32 number in [2^e, 2^(e+1)) keeps 3 mantissa bits when 1.5 · 2^(e+20) is added and taken away again.
_E4M3_SHIFT = 1.5 * 2.0**20
E4M3_SMALLEST_NORMAL = 2.0**-6
_FP32_EXPONENT = 0x7F800000
# Below this many elements one cast costs less than four arithmetic passes (measured on an AVX-512 core).
_CAST_BELOW = 4096


NONFINITE_REMEDY = (
    "Take another checkpoint if it came so; if training made it so, lower the learning rate, or let the guard veto "
    "non-finite gradients."
)
UNPUBLISHED = "holds NaN or inf and cannot be published."
_postponed: ContextVar[list[Tensor] | None] = ContextVar("postponed", default=None)


@contextmanager
def postponed_checks(kept: list[Tensor]) -> Iterator[None]:
    """Put what `require_finite` would wait for on an accelerator into `kept`, where the caller reads it later."""
    token = _postponed.set(kept)
    try:
        yield
    finally:
        _postponed.reset(token)


def not_finite(name: str, fault: str = UNPUBLISHED) -> ConfigError:
    """Return the error of a tensor with NaN or inf."""
    return ConfigError(f"{name} {fault}", expected="finite values", remedy=NONFINITE_REMEDY)


def runs_ahead(tensor: Tensor) -> bool:
    """Return True where reading a number of `tensor` makes the host wait for the device."""
    return tensor.device.type != "cpu"


def magnitude(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in `tensor`, NaN if it holds one.

    >>> magnitude(torch.tensor([1.0, -3.0])).item()
    3.0
    """
    tensor = tensor.detach()
    # one pass on an accelerator; the other way is the faster one on a CPU
    return torch.linalg.vector_norm(tensor, float("inf")) if runs_ahead(tensor) else tensor.abs().amax()


def magnitudes(stack: Tensor) -> Tensor:
    """Return `magnitude` of each matrix of "matrices out in".

    >>> magnitudes(torch.tensor([[[1.0, -3.0]], [[0.0, 2.0]]])).tolist()
    [3.0, 2.0]
    """
    stack = stack.detach().flatten(1)
    return torch.linalg.vector_norm(stack, float("inf"), dim=1) if runs_ahead(stack) else stack.abs().amax(dim=1)


def require_finite(amax: Tensor) -> None:
    """Raise `ConfigError` when `amax` (whose maximum propagates NaN) shows a NaN or an infinity in the weight."""
    kept = _postponed.get()
    if kept is not None and runs_ahead(amax):
        kept.append(amax)
        return
    if not bool(torch.isfinite(amax).all()):
        raise ConfigError(
            "The weight holds NaN or inf.",
            expected="finite values",
            given=f"a largest magnitude of {float(amax.max())}",
            remedy=NONFINITE_REMEDY,
        )


def scale_from_amax(amax: Tensor, steps: float) -> Tensor:
    """Return `amax / steps` in the dtype of `amax`; a zero becomes that dtype's epsilon.

    >>> scale_from_amax(torch.tensor([896.0, 0.0]), 448.0).tolist()
    [2.0, 1.1920928955078125e-07]
    """
    scale = amax / steps
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def to_e4m3(values: Tensor) -> Tensor:
    """Return `values` as float8_e4m3fn: to nearest even, saturating at ±448, −0 as +0 where it came in so."""
    return (values + 0.0).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def round_e4m3(values: Tensor) -> Tensor:
    """Return fp32 `values` (|x| ≤ 448) rounded to the nearest E4M3 number, ties to even, still fp32.

    The same numbers as a cast to float8 and back, five times faster on a CPU.

    >>> round_e4m3(torch.tensor([17.0, 19.0, 0.001])).tolist()
    [16.0, 20.0, 0.001953125]
    """
    if values.numel() < _CAST_BELOW or values.device.type != "cpu":
        return values.to(E4M3).to(torch.float32)
    power = (values.view(torch.int32) & _FP32_EXPONENT).view(torch.float32)
    shift = power.clamp_min_(E4M3_SMALLEST_NORMAL).mul_(_E4M3_SHIFT)
    return (values + shift).sub_(shift)


def to_fp4_codes(values: Tensor) -> Tensor:
    """Return the E2M1 codes (uint8, sign in bit 3) of `values`: to nearest even, saturating at ±6.

    >>> to_fp4_codes(torch.tensor([0.3, -2.5, 5.0, 9.0])).tolist()
    [1, 12, 6, 7]
    """
    magnitude = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint, tie_goes_down in _FP4_TIES:
        codes += magnitude > midpoint if tie_goes_down else magnitude >= midpoint
    return codes | ((values < 0).to(torch.uint8) << 3)


def fp4_values(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers that E2M1 codes (uint8, sign in bit 3) stand for."""
    table = torch.tensor(FP4_VALUES + tuple(-value for value in FP4_VALUES), dtype=dtype, device=codes.device)
    return table[codes.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return two 4-bit codes per byte along the last dimension, the first one in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the 4-bit codes of `pack_nibbles`, as uint8."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def pack_int4(codes: Tensor) -> Tensor:
    """Return eight signed 4-bit codes (int8, "out in") per int32, offset by 8, the first one lowest."""
    return pack_nibbles((codes + 8).view(torch.uint8)).contiguous().view(torch.int32)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the signed 4-bit codes of `pack_int4`, as int8 "out in"."""
    return unpack_nibbles(packed.contiguous().view(torch.uint8)).view(torch.int8) - 8


def power_of_two(biased: Tensor) -> Tensor:
    """Return 2^(biased − 127) in fp32 of the bytes of E8M0 numbers, NaN of 255; exact down to 2^-127.

    >>> power_of_two(torch.tensor([127, 130], dtype=torch.uint8)).tolist()
    [1.0, 8.0]
    """
    return biased.view(torch.float8_e8m0fnu).float()


def in_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Return a matrix, padded with zeros to whole blocks of so many rows and columns, as "m/r r k/c c".

    >>> in_blocks(torch.ones(3, 4), (2, 4)).shape
    torch.Size([2, 2, 1, 4])
    """
    (rows, columns), (r, c) = matrix.shape, block
    if rows % r or columns % c:
        matrix = F.pad(matrix, (0, -columns % c, 0, -rows % r))
    return matrix.reshape(-(-rows // r), r, -(-columns // c), c)


def of_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix of that shape that `in_blocks` cut."""
    r, c = blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3]
    return blocks.reshape(r, c)[: shape[0], : shape[1]].contiguous()


def with_bias(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the fp32 product `out` plus `bias`, added before the rounding to `dtype`."""
    return (out if bias is None else out.add_(bias)).to(dtype)
