"""Forward passes in which a row's bits do not depend on the rows beside it: learner and sampler then agree exactly.

A matrix product of m rows picks its kernel, and with it the order of its sums, by m; attention does so by the lengths.
A sampler that decodes one token at a time and a learner that scores whole sequences therefore differ in the last bits
under the same weights, and low-bit activations make steps of such bits. Here every product has the same shape whatever
the batch is, and every sum over keys runs in blocks that begin at a sequence's first token:

    y[i : i + R] = x[i : i + R] Wᵀ            for rows in tiles of R, the last one filled up with zeros
    s = Q_tile K_blockᵀ · scale, then the running softmax over blocks in the order of the keys:
    m' = max(m, max s);  l' = l e^(m − m') + Σ e^(s − m');  o' = o e^(m − m') + e^(s − m') V_block;  out = o / l

An engine that computes elsewhere, such as vLLM on a GPU, brings one product of its own, `product`, for plain weights;
everything else of its forward pass is then the learner's already, fused kernels too.

A key that a query may not see adds exactly 0. On a CPU even e^x has other last bits where it is computed for one number
instead of a vector of them, which happens at the end of a tensor and where threads divide it; so functions of single
numbers are computed in pieces of whole vectors. Backward passes are the usual ones, in one product each.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lit_qrl.errors import ConfigError

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From rows "m in", a weight "out in" and a bias or None to "m out", of which no row depends on the others."""

ROWS = 64
"""Rows of every matrix product with a weight."""
QUERIES, KEYS = 16, 64
"""Rows and columns of every product of attention."""
PIECE, VECTOR = 2**14, 128
"""Numbers of which a function is computed at once on a CPU: few enough for one thread, and whole vectors of them."""
CHECKED_LENGTH = KEYS + 9
"""Tokens of the sequences that `check_invariant` computes: more than one block of keys."""


class _Linear(torch.autograd.Function):
    """A product with a weight by a kernel for rows; backward the usual products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        with torch._C.DisableTorchFunction():
            out = kernel(x.reshape(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        return (
            (grad @ weight).view(x.shape) if wants_x else None,
            grad.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None,
            grad.sum(dim=0) if ctx.biased and wants_bias else None,
            None,
        )


def linear_by(kernel: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `kernel(rows, weight, bias)` of the rows of `x`, "... in" -> "... out", with the usual gradients."""
    return _Linear.apply(x, weight, bias, kernel)  # pyright: ignore[reportReturnType]


def unknown(what: str) -> ConfigError:
    """Return the error for an operation that is not batch-invariant here."""
    return ConfigError(
        f"This model computes {what}, of which there is no batch-invariant kernel here.",
        expected="linear layers and scaled dot-product attention",
        remedy="Set data.engine.batch_invariant to false, or model.policy.attn_implementation to sdpa.",
    )


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias`, of which no row depends on how many rows there are.

    Args:
        input: "... in".
        weight: "out in".
        bias: " out", or None.

    >>> invariant_linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """
    return linear_by(_tiled, input, weight, bias)


def _tiled(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = rows.new_empty(len(rows), len(weight))
    for start in range(0, len(rows), ROWS):
        tile = rows[start : start + ROWS]
        count = len(tile)
        if count < ROWS:
            tile = F.pad(tile, (0, 0, 0, ROWS - count))
        out[start : start + count] = F.linear(tile, weight, bias)[:count]
    return out


class _Apart(torch.autograd.Function):
    """What a kernel makes of tensors, with the gradients of torch's own function of them."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.plain = plain
        with torch._C.DisableTorchFunction():
            return kernel(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        return None, None, *torch.autograd.grad(out, inputs, grads[0])


def invariant_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = True,
) -> Tensor:
    """Return softmax(Q Kᵀ · scale) V "b heads m dim", of which no query's row depends on the others or on later keys.

    Column 0 of the keys must be the sequence's first token, which is why batches here have no padding on the left.

    Args:
        query: "b heads m d".
        key: "b key_heads n d"; heads a multiple of key_heads.
        value: "b key_heads n dim".
        attn_mask: broadcastable to "b heads m n": True where a query sees a key; None is all.
        dropout_p: 0.
        is_causal: query i sees keys 0 to i.
        scale: factor of the scores; None is 1/√d.
        enable_gqa: as torch's; heads may differ in any case.

    >>> one = torch.ones(1, 1, 1, 2)
    >>> invariant_attention(one, one, 3 * one)
    tensor([[[[3., 3.]]]])
    """
    if dropout_p:
        raise unknown("dropout in attention")
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise TypeError("Batch-invariant attention takes masks of True and False.")
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale}
    plain = partial(F.scaled_dot_product_attention, **options, enable_gqa=query.shape[1] != key.shape[1])
    return _Apart.apply(partial(_by_blocks, **options), plain, query, key, value)  # pyright: ignore[reportReturnType]


def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    b, heads, m, d = query.shape
    n, key_heads = key.shape[2], key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    if attn_mask is None:
        attn_mask = torch.ones(m, n, dtype=torch.bool, device=query.device)
        attn_mask = attn_mask.tril() if is_causal else attn_mask
    # The query heads of a key head are rows of one matrix, cut into tiles.
    rows = _tiles(query.to(dtype).reshape(b * key_heads, -1, d), QUERIES)
    sees = _tiles(attn_mask.expand(b, heads, m, n).reshape(b * key_heads, -1, n), QUERIES)
    count, tiles = len(rows) // (b * key_heads), len(rows)
    top = rows.new_full((tiles, QUERIES, 1), -torch.inf)
    total, out = torch.zeros_like(top), rows.new_zeros(tiles, QUERIES, value.shape[3])
    for start in range(0, n, KEYS):
        k, v = (_block(part, start, count, dtype) for part in (key, value))
        seen = F.pad(sees[..., start : start + KEYS], (0, max(0, start + KEYS - n)))
        scores = torch.bmm(rows, k.transpose(1, 2)).mul_(factor).masked_fill_(~seen, -torch.inf)
        raised = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        finite = raised.masked_fill(raised == -torch.inf, 0.0)
        shares, shrunk = (scores - finite).exp_(), (top - finite).exp_()
        total = total * shrunk + shares.sum(dim=-1, keepdim=True)
        out = out * shrunk + torch.bmm(shares, v)
        top = raised
    out = (out / total).to(query.dtype).view(b * key_heads, -1, value.shape[3])
    return out[:, : heads // key_heads * m].reshape(b, heads, m, value.shape[3])


def _tiles(rows: Tensor, size: int) -> Tensor:
    """Return "g r d" as "g·tiles size d", filled up with zeros."""
    rows = F.pad(rows, (0, 0, 0, -rows.shape[1] % size))
    return rows.reshape(-1, size, rows.shape[2])


def _block(part: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return keys or values of a block, "b·key_heads·count KEYS d", as often as there are tiles of queries."""
    block = part[:, :, start : start + KEYS].to(dtype).flatten(0, 1)
    block = F.pad(block, (0, 0, 0, KEYS - block.shape[1]))
    return block.repeat_interleave(count, dim=0)


def _by_pieces(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of single numbers that computes them in pieces of whole vectors."""

    def apply(x: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        def plain(piece: Tensor) -> Tensor:
            return function(piece, *args, **kwargs)

        def pieces(x: Tensor) -> Tensor:
            numbers = x.reshape(-1)
            out = torch.empty_like(numbers)
            for start in range(0, len(numbers), PIECE):
                piece = numbers[start : start + PIECE]
                out[start : start + PIECE] = plain(F.pad(piece, (0, -len(piece) % VECTOR)))[: len(piece)]
            return out.view(x.shape)

        return _Apart.apply(pieces, plain, x) if x.device.type == "cpu" else plain(x)  # pyright: ignore

    return apply


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    pieces = _by_pieces(function)
    return lambda x: x.copy_(pieces(x))


def _logsumexp(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return log Σ e^x over the last dimension, as the sampler computes it."""
    top = input.amax(dim=dim, keepdim=True)
    total = _by_pieces(torch.exp)(input - top).sum(dim=dim, keepdim=True)
    out = _by_pieces(torch.log)(total) + top
    return out if keepdim else out.squeeze(dim)


def _products(linear: Product, otherwise: Callable[[Tensor, Tensor], Tensor]) -> dict[Any, Callable[..., Tensor]]:
    """Return what takes the place of torch's products with weights; of two activations they are `otherwise`."""

    def matmul(input: Tensor, other: Tensor) -> Tensor:
        return linear(input, other.t(), None) if other.ndim == 2 and input.ndim >= 2 else otherwise(input, other)

    def addmm_(input: Tensor, mat1: Tensor, mat2: Tensor, *, alpha: float = 1.0) -> Tensor:
        return input.add_(linear(mat1, (mat2 * alpha).t(), None))  # an adapter's term, as engines hold it

    matrices = dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), matmul)
    return {F.linear: linear, Tensor.addmm_: addmm_, **matrices}


def _outer(input: Tensor, other: Tensor) -> Tensor:
    if input.shape[-1] != 1:  # one product each, and no sums
        raise unknown("a product of two activations")
    return torch.matmul(input, other)


def _grouped(input: Tensor, weight: Tensor, offs: Tensor, bias: None = None, out_dtype: None = None) -> Tensor:
    """Return the rows of each expert times its matrix of "experts in out"; they lie in order, up to the ends `offs`."""
    counts = offs.diff(prepend=offs.new_zeros(1)).tolist()
    parts = zip(input.split([*counts, len(input) - sum(counts)]), weight, strict=False)
    return torch.cat([invariant_linear(rows, expert.t()) for rows, expert in parts])


def _refused(name: str) -> Callable[..., Tensor]:
    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise unknown(name)

    return refuse


ELEMENTWISE = ("exp", "log", "tanh", "sigmoid", "cos", "sin", "rsqrt", "erf")
"""Functions of single numbers that models and samplers compute."""
KERNELS: Mapping[Any, Callable[..., Tensor]] = {
    **_products(invariant_linear, _outer),
    torch._grouped_mm: _grouped,
    F.scaled_dot_product_attention: invariant_attention,
    **{getattr(F, name): _by_pieces(getattr(F, name)) for name in ("silu", "gelu", "softplus", "mish")},
    **{getattr(of, name): _by_pieces(getattr(torch, name)) for name in ELEMENTWISE for of in (torch, Tensor)},
    **{getattr(Tensor, f"{name}_"): _in_place(getattr(torch, name)) for name in ELEMENTWISE},
    torch.logsumexp: _logsumexp,
    Tensor.logsumexp: _logsumexp,
    **{getattr(torch, name): _refused(f"torch.{name}") for name in ("bmm", "baddbmm", "einsum", "conv1d")},
}
"""Functions of torch, and what takes their place."""


def products_by(product: Product) -> Mapping[Any, Callable[..., Tensor]]:
    """Return what takes the place of torch's products with weights where an engine's own is called."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_by(product, input, weight, bias)

    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
        return linear(mat1, mat2.t(), input)

    return {**_products(linear, torch.matmul), torch.addmm: addmm}  # others are such as the angles of positions


class BatchInvariant(TorchFunctionMode):
    """While it is entered, products with weights and attention are invariant ones.

    Args:
        kernels: what takes the place of torch's functions.
        fused: whether the learner's fused kernels stay, which are the engine's too.
    """

    def __init__(self, kernels: Mapping[Any, Callable[..., Tensor]] = KERNELS, fused: bool = False) -> None:
        super().__init__()
        self.kernels, self.fused = kernels, fused

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return what the invariant kernel gives, or the function itself where every row is computed alone."""
        return self.kernels.get(func, func)(*args, **(kwargs or {}))


def batch_invariant(enabled: bool, product: Product | None = None) -> AbstractContextManager[object]:
    """Return a context in which forward passes are batch-invariant, where that is asked for.

    Args:
        enabled: False leaves them as they are.
        product: the engine's own, where all else is the learner's; None takes this module's kernels.
    """
    if not enabled:
        return nullcontext()
    return BatchInvariant() if product is None else BatchInvariant(products_by(product), fused=True)


def one_by_one() -> bool:
    """Return whether operations must be those of the plain modules now, since a sampler computes them so."""
    return isinstance(mode := as_entered(), BatchInvariant) and not mode.fused


def as_entered() -> AbstractContextManager[object]:
    """Return the context in which a layer is computed again as it is computed now."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, BatchInvariant)]
    return modes[-1] if modes else nullcontext()


@torch.no_grad()
def check_invariant(hidden: Callable[[Tensor], Tensor], vocabulary: int, device: torch.device) -> None:
    """Raise `ConfigError` where a model's hidden states depend on what else is in the batch.

    Args:
        hidden: from tokens "b s" to the last hidden states "b s h".
        vocabulary: number of token ids.
        device: of the tokens.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (3, CHECKED_LENGTH), generator=generator).to(device)
    with batch_invariant(True):
        together = hidden(tokens)
        for name, alone in (
            ("the sequences beside it", hidden(tokens[1:2])[0]),
            ("the tokens behind it", hidden(tokens[1:2, : CHECKED_LENGTH - 4])[0]),
        ):
            if not torch.equal(alone, together[1, : len(alone)]):
                raise ConfigError(
                    f"The hidden states of a sequence depend on {name}, on this device and in this model.",
                    expected="the same bits in every batch",
                    given=f"{float((alone - together[1, : len(alone)]).abs().max()):.1e} apart",
                    remedy="Set data.engine.batch_invariant to false"
                    + (", or take VLLMEngine, which has such kernels for a GPU." if device.type == "cuda" else "."),
                )
