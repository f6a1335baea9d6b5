"""KL(learner‖reference) over the whole vocabulary, without holding the logits of either: on-policy distillation."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_qrl.functional.logprobs import CHUNK_ELEMENTS, raised_linear


def vocabulary_kl(
    hidden: Float[Tensor, "n h"],
    head: Mapping[str, Any],
    reference_hidden: Float[Tensor, "n k"],
    reference_head: Mapping[str, Any],
    temperature: float = 1.0,
    chunk_elements: int | None = None,
) -> Float[Tensor, " n"]:
    r"""Return $\mathrm{KL}(p \| q) = \sum_v p_v (\log p_v - \log q_v)$ of every position, in nats, with gradient to p.

    p and q are the softmax of the two heads' logits over the temperature, $z = \mathrm{cap}(\mathrm{scale} (W h + b))
    / T$ as in `token_logprobs`, and $\partial \mathrm{KL} / \partial z_v = p_v (\log p_v - \log q_v - \mathrm{KL})$.
    On the sampler's own completions it is the exact form, at each position, of what `kl_penalty` estimates from the
    drawn token (GKD, arXiv:2306.13649, its reverse KL; MiniLLM, arXiv:2306.08543). Rows go through in chunks, whose
    logits are made again in the backward pass. Where one head has more rows than the other, which are padding, the
    words of both are compared.

    Args:
        hidden: "n h", the learner's last hidden states.
        head: `weight` "v h", `bias` " v" or None, `scale` and `softcap` of its logits.
        reference_hidden: "n k", the reference's; no gradient flows.
        reference_head: the same of the reference, over the same words.
        temperature: positive, of both.
        chunk_elements: logits held at once of each; None takes `CHUNK_ELEMENTS` of the device.

    Raises:
        ValueError: for a temperature that is not positive.

    >>> head = {"weight": torch.eye(2), "bias": None, "scale": 1.0, "softcap": None}
    >>> vocabulary_kl(torch.tensor([[1.0, 0.0]]), head, torch.tensor([[0.0, 0.0]]), head)
    tensor([0.1109])
    """
    if temperature <= 0:
        raise ValueError(f"The KL needs a positive temperature. Given: {temperature}. Compare greedy samples at 1.")
    words = min(len(head["weight"]), len(reference_head["weight"]))
    own, other = ({**one, "weight": one["weight"][:words]} for one in (head, reference_head))
    for one in (own, other):
        one["bias"] = None if one["bias"] is None else one["bias"][:words]
        one["temperature"] = temperature
    rows = max(1, (chunk_elements or CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cpu"])) // words)
    with torch.autocast(hidden.device.type, enabled=False):
        return _VocabularyKL.apply(hidden, own["weight"], own["bias"], own, reference_hidden, other, rows)  # pyright: ignore[reportReturnType]


def _log_shares(hidden: Tensor, head: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return log-probs "n v" in fp32 or above, and the derivative of the soft-cap, if there is one."""
    scores = raised_linear(hidden.to(head["weight"].dtype), head["weight"], head["bias"], None)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * head["scale"]
    slope = None
    if head["softcap"] is not None:
        capped = torch.tanh(scores / head["softcap"])
        scores, slope = capped * head["softcap"], 1 - capped.square()
    return (scores / head["temperature"]).log_softmax(dim=-1), slope


class _VocabularyKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Mapping[str, Any],
        reference_hidden: Tensor,
        reference_head: Mapping[str, Any],
        rows: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, reference_hidden)
        ctx.heads, ctx.rows = (head, reference_head), rows
        parts = []
        for start in range(0, len(hidden), rows):
            own, _ = _log_shares(hidden[start : start + rows], head)
            other, _ = _log_shares(reference_hidden[start : start + rows], reference_head)
            parts.append(_summed(own.exp(), own - other))
        return torch.cat(parts) if parts else hidden.new_empty(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, reference_hidden = ctx.saved_tensors
        (head, reference_head), rows = ctx.heads, ctx.rows
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over chunks run in fp32: thousands of chunks would round away in bf16.
        summed = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=summed) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=summed) if needs_bias else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            own, slope = _log_shares(hidden[part], head)
            gap, shares = own - _log_shares(reference_hidden[part], reference_head)[0], own.exp()
            # A word of probability 0 may have a gap of any size, and no share in the sum.
            grad = torch.where(shares > 0, shares * (gap - _summed(shares, gap)[:, None]), 0.0)
            grad *= grads[0][part, None] * (head["scale"] / head["temperature"])
            if slope is not None:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part].to(weight.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )


def _summed(shares: Tensor, gap: Tensor) -> Tensor:
    return torch.where(shares > 0, shares * gap, 0.0).sum(dim=-1)
