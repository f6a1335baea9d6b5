"""Log-probs and entropies of tokens, from logits or straight from hidden states without ever holding all logits."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_qrl.functional._gradients import added, weight_gradients
from lit_qrl.functional._launch import triton_installed

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Logits held at once: 16 MB of fp32 on a CPU (about its last-level cache), 256 MB on a GPU (440 rows of a 150,000-word
vocabulary, enough to fill its matrix units). The entropy takes three times as much for a moment. Where one kernel
reduces them they stay in 16 bits, and as many go at once as `KERNEL_SHARE` says."""
KERNEL_SHARE = 1 / 64
"""Of a GPU's memory that a chunk of 16-bit logits takes at most: each chunk is added to the weight's gradient in fp32,
which takes as long as two fifths of the product that makes it for 1,800 rows, and nothing where one chunk is all."""


def kernel_elements(memory: int) -> int:
    """Return how many 16-bit logits are held at once on a GPU: a power of two, at least as many as of fp32.

    Args:
        memory: of the GPU, bytes.

    >>> [kernel_elements(gib << 30) >> 20 for gib in (16, 80, 141)]
    [128, 512, 1024]
    """
    return max(CHUNK_ELEMENTS["cuda"], 2 ** int(math.log2(memory * KERNEL_SHARE / 2)))


def even_rows(count: int, most: int, multiple: int = 128) -> int:
    """Return how many rows a chunk has of `count`, so that all have about as many: a small product keeps no GPU busy.

    >>> even_rows(8192, 7067), even_rows(8192, 9000), even_rows(300, 7), even_rows(0, 7067)
    (4096, 8192, 7, 128)
    """
    count = max(count, 1)  # all tokens of a micro-batch may be masked
    chunks = -(-count // most)
    return min(-(-count // (chunks * multiple)) * multiple, most)


def held_chunks(count: int, size: int, room: int) -> int:
    """Return how many of `count` chunks of logits may stay, where one that does not is at work beside them.

    Args:
        count: chunks.
        size: of one, bytes.
        room: for all of them, bytes.

    >>> [held_chunks(4, 10, room) for room in (5, 15, 25, 39, 40)]
    [0, 0, 1, 2, 4]
    """
    fit = room // max(size, 1)
    return count if fit >= count else max(fit - 1, 0)


Pick = Callable[[Tensor, Tensor, float], Tensor]


def softmax_logprobs(
    scores: Float[Tensor, "*n v"], tokens: Int[Tensor, "*n"], temperature: float = 1.0
) -> Float[Tensor, "*n"]:
    """Return the log-probs of tokens by torch's log-softmax, as the sampler of vLLM's first runner has them.

    Args:
        scores: "*n v".
        tokens: "*n", ids in [0, v).
        temperature: positive, by which the scores are not divided yet.

    >>> softmax_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    tensor([-0.3133])
    """
    scores = _raised(scores)
    if temperature != 1.0:
        scores = scores / scores.new_tensor(temperature)
    return scores.log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]


def token_logprobs(
    hidden: Float[Tensor, "*n h"],
    weight: Float[Tensor, "v h"],
    tokens: Int[Tensor, "*n"],
    temperature: float = 1.0,
    bias: Float[Tensor, " v"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_elements: int | None = None,
    head_dtype: torch.dtype | None = None,
    pick: Pick | None = None,
    kept: Int[Tensor, "*n k"] | None = None,
    held: int = 0,
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"] | None]:
    r"""Return the log-probs of `tokens` and, where asked for, the full-vocabulary entropies, both in nats.

    $\log \pi(y) = z_y - \log \sum_v e^{z_v}$ with
    $z = \mathrm{cap}(\mathrm{scale} \cdot (W h + b)) / T$ and $\mathrm{cap}(x) = c \tanh(x / c)$;
    $H = \log \sum_v e^{z_v - m} - \sum_v \pi_v (z_v - m)$ and $m = \max_v z_v$, never below 0.

    The rows go through in chunks; each chunk's logits are made in the dtype of `hidden`, raised to fp32, reduced, and
    dropped, and made again in the backward pass. Neither pass holds more than `chunk_elements` logits, but for those
    that `held` lets stay in between.

    Args:
        hidden: "*n h", last hidden states at the positions that predict `tokens`.
        weight: "v h", the output embedding.
        tokens: "*n", token ids in [0, v).
        temperature: positive; log-probs are those of the distribution at it.
        bias: " v", of the output embedding.
        softcap: c of the final logit soft-capping, or None.
        scale: multiplies the logits before the cap.
        entropy: also return the entropy of each position's distribution.
        entropy_gradient: let gradients through the entropies; else they are detached.
        chunk_elements: logits held at once; None takes `CHUNK_ELEMENTS` of the device.
        head_dtype: of the products with the output embedding, both ways, fp32 or above; hidden states and weight are
            raised to it, the weight by at most `chunk_elements` at a time. None takes the dtype of `hidden`, or of
            autocast.
        pick: from logits "m v", tokens " m" and a temperature by which the logits are not divided yet to their
            log-probs, where another order of the sums than that of this function is wanted.
        kept: "*n k", ids of the words that a token could be, −1 behind them: the distribution is the one over those,
            as a sampler with `top_p` or `top_k` has it. None, or no id at all, is the whole vocabulary.
        held: bytes that logits may take from the forward to the backward pass, which need not make these again: a
            quarter of the products with a trained head. Where one kernel reduces them; elsewhere none stay.

    Raises:
        ValueError: for a temperature that is not positive, or shapes that do not fit.

    >>> logprobs, entropies = token_logprobs(torch.eye(2), torch.eye(2), torch.tensor([0, 0]), entropy=True)
    >>> logprobs
    tensor([-0.3133, -1.3133])
    >>> entropies
    tensor([0.5822, 0.5822])
    """
    if temperature <= 0:
        raise ValueError(
            f"Log-probs need a positive temperature. Given: {temperature}. Score greedy samples at temperature 1."
        )
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(
            f"Hidden states and tokens differ in shape. Expected: {tuple(tokens.shape)} + (h,). "
            f"Given: {tuple(hidden.shape)}. Select the hidden states that predict the tokens."
        )
    device = hidden.device.type
    if head_dtype is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
    asked = chunk_elements
    if chunk_elements is None:
        chunk_elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cpu"])
    plain = bias is None and softcap is None and head_dtype is None and not (entropy and entropy_gradient)
    kernel = plain and kept is None and _kernel_takes(hidden)
    if kernel:
        chunk_elements = asked or kernel_elements(torch.cuda.get_device_properties(hidden.device).total_memory)
    rows, width = (max(1, chunk_elements // size) for size in weight.shape)
    if kernel:
        rows = even_rows(tokens.numel(), rows)
    chunk = rows * weight.shape[0] * hidden.element_size()
    stay = held_chunks(-(-tokens.numel() // rows), chunk, held) if kernel and torch.is_grad_enabled() else 0
    options = _Options(
        temperature, softcap, scale, entropy, entropy_gradient, head_dtype, width, rows, kernel, pick, stay
    )
    with torch.autocast(device, enabled=False):
        logprobs, entropies = _TokenLogprobs.apply(
            hidden.flatten(0, -2),
            weight if head_dtype else weight.to(hidden.dtype),
            bias if bias is None or head_dtype else bias.to(hidden.dtype),
            tokens.flatten(),
            None if kept is None else kept.flatten(0, -2),
            options,
        )  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs.view(tokens.shape), entropies.view(tokens.shape) if entropy else None


def raised_linear(
    hidden: Float[Tensor, "*n h"],
    weight: Float[Tensor, "v h"],
    bias: Float[Tensor, " v"] | None,
    dtype: torch.dtype | None,
    width: int | None = None,
) -> Float[Tensor, "*n v"]:
    """Return `hidden @ weight.T + bias` computed in `dtype`; no copy of the whole weight in it is made.

    Args:
        hidden: "*n h".
        weight: "v h".
        bias: " v", or None.
        dtype: of the product; None takes that of the operands.
        width: rows of the weight that are raised at a time; None takes `CHUNK_ELEMENTS` of the device.

    >>> raised_linear(torch.ones(1, 2), torch.tensor([[1.0, 2**-9]]).bfloat16(), None, torch.float32).item()
    1.001953125
    """
    if dtype is None or hidden.dtype == weight.dtype == dtype:
        return torch.nn.functional.linear(hidden, weight, bias)
    if width is None:
        elements = CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cpu"])
        width = max(1, elements // weight.shape[1])
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    out = rows.new_empty(len(rows), len(weight))
    for part in _parts(len(weight), width):
        out[:, part] = rows @ weight[part].to(dtype).t()
    if bias is not None:
        out += bias.to(dtype)
    return out.view(*hidden.shape[:-1], len(weight))


def _parts(size: int, width: int) -> list[slice]:
    return [slice(start, start + width) for start in range(0, size, width)]


def _raised(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _entropy(scores: Tensor) -> Tensor:
    # From the largest score on, so that no two large numbers cancel and no term is below zero.
    below = scores - scores.amax(dim=-1, keepdim=True)
    shares = below.exp()
    total = shares.sum(dim=-1)
    # A word of probability 0 has a score of -inf and adds 0 · -inf = nan; its true share is 0.
    return total.log() - torch.where(shares > 0, below.mul_(shares), 0.0).sum(dim=-1) / total


def _kernel_takes(hidden: Tensor) -> bool:
    """Return whether the logits of these hidden states may be reduced by `_logprobs_triton`."""
    return (
        hidden.device.type == "cuda"
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and triton_installed("logprobs")
    )


class _Options(NamedTuple):
    """What `_TokenLogprobs` is asked for.

    `width` rows of the weight are raised at once; a chunk has `rows`, and the logits of the first `stay` chunks stay.
    """

    temperature: float
    softcap: float | None
    scale: float
    entropy: bool
    entropy_gradient: bool
    head_dtype: torch.dtype | None
    width: int
    rows: int
    kernel: bool
    pick: Pick | None
    stay: int


def _outside(kept: Tensor, words: int) -> Tensor:
    """Return True "n v" for words that are not among the kept ids "n k"; nothing is outside of none."""
    outside = torch.ones(len(kept), words + 1, dtype=torch.bool, device=kept.device)
    outside.scatter_(1, kept.long() + 1, False)  # the first column takes the −1
    return outside[:, 1:] & (kept >= 0).any(dim=1, keepdim=True)


def _added_product(total: Tensor | None, grad: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `total + gradᵀ rows` in `dtype`, written over `total`; None stands for zeros."""
    if grad.device.type != "cuda" or dtype != torch.float32 or grad.dtype == dtype:
        made = grad.T @ rows
        return made.to(dtype) if total is None else total.add_(made)
    if total is None:
        return torch.mm(grad.T, rows, out_dtype=dtype)
    return torch.addmm(total, grad.T, rows, out_dtype=dtype, out=total)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs by chunks of rows; the backward pass makes those logits again that could not stay."""

    @staticmethod
    def _scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> tuple[Tensor, Tensor | None]:
        """Return the fp32 scores of a chunk and the derivative of the soft-cap, if there is one."""
        scores = _raised(raised_linear(hidden, weight, bias, options.head_dtype, options.width))
        if options.scale != 1.0:
            scores = scores * options.scale
        slope = None
        if options.softcap is not None:
            capped = torch.tanh(scores / options.softcap)
            slope = 1 - capped.square()
            scores = capped * options.softcap
        if options.temperature != 1.0:
            # by a tensor: a GPU multiplies by the reciprocal of a number, which rounds differently
            scores = scores / scores.new_tensor(options.temperature)
        return scores, slope

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        kept: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        rows, pick = options.rows, options.pick
        dtype = torch.float64 if torch.float64 in (hidden.dtype, options.head_dtype) else torch.float32
        logprobs = torch.empty(len(tokens), dtype=dtype, device=hidden.device)
        normalizer = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs) if options.entropy else logprobs.new_empty(0)
        ctx.logits = {}
        for start in range(0, len(tokens), rows):
            part = slice(start, start + rows)
            if options.kernel:
                from lit_qrl.functional import _logprobs_triton

                logits = torch.nn.functional.linear(hidden[part], weight)
                if start < options.stay * rows:  # the first, which are given back while others are made
                    ctx.logits[start] = logits
                factor = options.scale / options.temperature
                normalizer[part], chosen, spread = _logprobs_triton.reduced(
                    logits, tokens[part], factor, options.entropy
                )
                logprobs[part] = chosen - normalizer[part]
                if pick is not None:
                    logprobs[part] = pick(logits, tokens[part], options.temperature)
                if spread is not None:
                    entropies[part] = spread
                continue
            scores, _ = _TokenLogprobs._scores(hidden[part], weight, bias, options)
            if kept is not None:
                scores = scores.masked_fill_(_outside(kept[part], len(weight)), -torch.inf)
            normalizer[part] = scores.logsumexp(dim=-1)
            if pick is None:
                logprobs[part] = scores.gather(-1, tokens[part, None])[:, 0] - normalizer[part]
            else:
                logprobs[part] = pick(scores, tokens[part], 1.0)
            if options.entropy:
                entropies[part] = _entropy(scores)
        differentiable = options.entropy and options.entropy_gradient
        ctx.save_for_backward(hidden, weight, bias, tokens, kept, normalizer, entropies if differentiable else None)
        ctx.options, ctx.weight = options, weight  # itself, whose gradient may be there
        if not differentiable:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, tokens, kept, normalizer, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head_dtype, width, rows = ctx.options.head_dtype, ctx.options.width, ctx.options.rows
        factor = ctx.options.scale / ctx.options.temperature
        dtype = head_dtype or hidden.dtype
        upstream = grads[0].to(normalizer.dtype) * factor
        upstream_entropy = None if entropies is None else grads[1].to(normalizer.dtype) * factor
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over chunks run in fp32: thousands of chunks would round away in bf16.
        several = len(tokens) > rows or head_dtype is not None
        summed = normalizer.dtype if several else weight.dtype
        grad_weight = None
        grad_bias = torch.zeros_like(bias, dtype=normalizer.dtype) if needs_bias else None
        for start in range(0, len(tokens), rows):
            part = slice(start, start + rows)
            if ctx.options.kernel:
                from lit_qrl.functional import _logprobs_triton

                grad = ctx.logits.pop(start, None)  # a second backward pass finds none: they become their gradient
                if grad is None:
                    grad = torch.nn.functional.linear(hidden[part], weight)
                _logprobs_triton.to_gradient(grad, tokens[part], normalizer[part], upstream[part], factor)
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[part])
                if needs_weight and not several:  # one chunk
                    return grad_hidden, weight_gradients([ctx.weight], grad, hidden[part])[0], None, None, None, None
                if needs_weight:
                    grad_weight = _added_product(grad_weight, grad, hidden[part], summed)
                continue
            scores, slope = _TokenLogprobs._scores(hidden[part], weight, bias, ctx.options)
            if kept is not None:
                scores = scores.masked_fill_(_outside(kept[part], len(weight)), -torch.inf)
            # d log π(y) / d z = onehot(y) − π
            step = upstream[part, None]
            log_shares = scores.sub_(normalizer[part, None])
            if upstream_entropy is None or entropies is None:
                grad = log_shares.exp_().mul_(-step)
            else:
                # d H / d z = −π (log π + H), which goes to 0 with π
                shares = log_shares.exp()
                bend = upstream_entropy[part, None] * (log_shares + entropies[part, None])
                grad = torch.where(shares > 0, -shares * (step + bend), 0.0)
            grad.scatter_add_(1, tokens[part, None], step)
            if slope is not None:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(dtype)
            if grad_hidden is not None:
                if dtype == hidden.dtype == weight.dtype:
                    torch.mm(grad, weight, out=grad_hidden[part])
                else:
                    grad_hidden[part] = sum(grad[:, own] @ weight[own].to(dtype) for own in _parts(len(weight), width))
            if needs_weight:
                grad_weight = _added_product(grad_weight, grad, hidden[part].to(dtype), summed)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        if grad_weight is not None and ctx.options.kernel:
            return grad_hidden, added([ctx.weight], grad_weight)[0], None, None, None, None
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )
