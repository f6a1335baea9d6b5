"""What kernels have instructions of the device for, by plain operations: Triton's interpreter knows none of them."""

from types import SimpleNamespace

import triton
import triton.language as tl

from lit_qrl.formats.kernels import tiles_triton


@triton.jit
def reciprocal(x, FLUSH: tl.constexpr):
    return 1.0 / x


@triton.jit
def inexact_reciprocal(x, FLUSH: tl.constexpr):
    return (1.0 / x) * (1 + 2.0**-23)


@triton.jit
def exp(x):
    return tl.exp(x)


def use(patch, inverse=reciprocal):
    """Let the fused quantizers compute so, with this for the reciprocal that the device approximates."""
    patch.setattr(tiles_triton, "_reciprocal", inverse)
    patch.setattr(tiles_triton, "libdevice", SimpleNamespace(exp=exp))
