"""What a product with a unit vector may round, by which a kernel shows a column of what it multiplies with."""

import torch
from torch import Tensor

SHORTENED = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}
"""By what share fp32 may be rounded before it is multiplied, by `torch.get_float32_matmul_precision()`."""


def column_bound(weight: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
    """Return by how much a GEMM with a unit vector may miss each entry of a weight, from its arithmetic alone.

    All terms of such a product but one are zeros, so neither the order nor the length of the sum rounds, on whatever
    instructions. A plain weight comes back bit for bit, but for what matrix units take for zero (below 2⁻¹²⁶), and but
    for the digits that torch was told to leave out of fp32. A quantized one is rounded at most three times in `dtype`
    (code times the block's scale, times the layer's, the result) and five times in fp32 (the activations' scale, two
    products with scales, two in what it is compared with): by u |w| each time, where u is half the dtype's epsilon, and
    below the dtype's smallest normal number by u times that number.

    Args:
        weight: "out columns", fp32, as it was sent.
        dtype: of the GEMM's result.
        exact: True for a plain weight.

    >>> [float(column_bound(torch.ones(1, 1), torch.bfloat16, exact)) for exact in (False, True)]
    [0.011719048023223877, 1.1754943508222875e-38]
    """
    bound = torch.full_like(weight, torch.finfo(torch.float32).tiny)
    if dtype == torch.float32:
        bound += SHORTENED[torch.get_float32_matmul_precision()] * weight.abs()
    if exact:
        return bound
    for times, rounded in ((3, torch.finfo(dtype)), (5, torch.finfo(torch.float32))):
        bound += times * rounded.eps / 2 * weight.abs().clamp_min(rounded.tiny)
    return bound


def share_of_bound(got: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """Return for each entry how far the engine's GEMM is from the weight, as a share of `column_bound`.

    Args:
        got: "out columns", in the dtype that the GEMM returns.
        weight: the same columns as they were sent, fp32.
        exact: True for a plain weight.
    """
    share = (got.to(weight) - weight).abs() / column_bound(weight, got.dtype, exact)
    return share.nan_to_num(nan=torch.inf)
