r"""Masked diffusion: which tokens a step draws and unmasks, and estimates of a completion's log-probs.

Decoding begins with a completion of mask tokens. A step draws a token for every masked position of the block under way
and keeps those that the model is surest of; the others stay masked (low-confidence remasking; LLaDA, arXiv:2502.09992,
Algorithm 5). Blocks are decoded from left to right.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Score = Callable[[Tensor, slice], Tensor]
"""From a canvas "b p+n" and a part of the completion to figures "f b part" of the completion's tokens there, the
log-probs first."""


def gumbel_argmax(
    logits: Float[Tensor, "*n v"], uniform: Float[Tensor, "*n v"] | None, temperature: float
) -> Int[Tensor, "*n"]:
    r"""Return tokens drawn from softmax(logits / temperature) by adding Gumbel noise; of equal scores, the first.

    $y = \arg\max_v \, z_v + T g_v$ with $g_v = -\log(-\log u_v)$ and u uniform in [0, 1). It is LLaDA's
    $\arg\max_v e^{z_v} / (-\log u_v)^T$ after a logarithm. Computed in fp64: in fp32 the noise has a shorter tail,
    which lowers the temperature (arXiv:2409.02908, §4).

    Args:
        logits: "*n v"; −inf is never drawn.
        uniform: "*n v", in [0, 1); None is greedy, as is a temperature of 0.
        temperature: at least 0.

    Raises:
        ValueError: for a negative temperature.

    >>> logits, uniform = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0.1, 0.9, 0.1])
    >>> [gumbel_argmax(logits, uniform, temperature).item() for temperature in (0.0, 0.3, 1.0)]
    [0, 0, 1]
    """
    if temperature < 0:
        raise ValueError(f"A temperature is negative. Expected: 0 (greedy) or more. Given: {temperature}. Raise it.")
    if uniform is None or temperature == 0:
        return logits.argmax(dim=-1)
    noise = -torch.log(-torch.log(uniform.double()))
    return (logits.double() + temperature * noise).argmax(dim=-1)


def confidence(logits: Float[Tensor, "*n v"], tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    r"""Return how sure the model is of tokens: their probabilities without noise, at temperature 1.

    $c = e^{z_y} / \sum_v e^{z_v}$, in fp32 at least.

    Args:
        logits: "*n v".
        tokens: "*n", drawn.

    >>> confidence(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    tensor([0.7311])
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return (scores.gather(-1, tokens[..., None])[..., 0] - scores.logsumexp(dim=-1)).exp()


def most_confident(confidence: Float[Tensor, "b t"], masked: Bool[Tensor, "b t"], count: int) -> Bool[Tensor, "b t"]:
    """Return which positions a step unmasks: the `count` masked ones of the highest confidence in each row.

    Of positions with the same confidence the leftmost come first, so that the order is defined. A row with fewer masked
    positions unmasks all of them.

    Args:
        confidence: "b t".
        masked: "b t", positions that may be unmasked.
        count: at least 1.

    >>> sure, masked = torch.tensor([[0.9, 0.5, 0.5, 0.5]]), torch.tensor([[False, True, True, True]])
    >>> most_confident(sure, masked, 2)
    tensor([[False,  True,  True, False]])
    """
    order = confidence.masked_fill(~masked, -1.0).argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(masked).scatter_(1, order[:, :count], True)
    return chosen & masked


def blocks_of(length: int, block: int) -> list[slice]:
    """Return the blocks of a completion in the order of their decoding: from left to right.

    Args:
        length: positions of the completion, a multiple of `block`.
        block: positions of a block.

    Raises:
        ValueError: when the blocks do not fill the completion.

    >>> blocks_of(64, 32)
    [slice(0, 32, None), slice(32, 64, None)]
    """
    if block < 1 or length % block:
        raise ValueError(
            f"Blocks do not fill a completion. Expected: a multiple of {block} positions. Given: {length}. Change one."
        )
    return [slice(start, start + block) for start in range(0, length, block)]


def canvases(
    prompt: Int[Tensor, "b p"],
    completion: Int[Tensor, "b t"],
    length: int,
    hidden: Bool[Tensor, "b p"],
    mask_token: int,
    block: int | None = None,
) -> Iterator[tuple[Int[Tensor, "b s"], slice]]:
    """Yield what the model is shown to estimate a completion's log-probs, and the part of it that each view scores.

    Without blocks there is one view, with the completion fully masked: the one-step estimate of d1 (diffu-GRPO,
    arXiv:2504.12216, §3.2). With blocks there is one for each: the blocks before are shown, it and those behind are
    masked, as at the first step of its decoding. In both, prompt tokens are masked where `hidden` says so.

    Args:
        prompt: "b p", token ids.
        completion: "b t", token ids; what is right of them is masked in every view.
        length: positions that the completion was drawn over, at least t.
        hidden: "b p", prompt tokens that are masked.
        mask_token: id of the mask token.
        block: positions of a block; None is the one-step estimate.

    >>> prompt, completion = torch.tensor([[5, 6]]), torch.tensor([[7, 8]])
    >>> hidden = torch.tensor([[True, False]])
    >>> [(canvas.tolist(), part) for canvas, part in canvases(prompt, completion, 2, hidden, 0, block=1)]
    [([[0, 6, 0, 0]], slice(0, 1, None)), ([[0, 6, 7, 0]], slice(1, 2, None))]
    """
    b, t = completion.shape
    shown = prompt.masked_fill(hidden, mask_token)
    blank = completion.new_full((b, length), mask_token)
    if block is None:
        yield torch.cat([shown, blank], dim=1), slice(0, t)
        return
    for part in blocks_of(length, block):
        if part.start >= t:
            return
        blank[:, : part.start] = completion[:, : part.start]
        yield torch.cat([shown, blank], dim=1), slice(part.start, min(part.stop, t))


def masked_estimate(
    score: Score,
    prompt: Int[Tensor, "b p"],
    completion: Int[Tensor, "b t"],
    length: int,
    hidden: Bool[Tensor, "m b p"],
    mask_token: int,
    block: int | None = None,
) -> Float[Tensor, "f b t"]:
    r"""Return a completion's figures, the log-probs of its tokens first, averaged over masks of the prompt.

    $\hat{\ell}_t = \frac{1}{m} \sum_{i=1}^{m} \log p_\theta(y_t \mid q^{(i)}, c_t)$, where each token of $q^{(i)}$ is
    masked with the probability that `hidden` was drawn with, and $c_t$ is a completion of masks, before which the
    finished blocks stand where there are blocks (`canvases`). d1 takes m = 1 without blocks (its eq. 6 and 7).

    Args:
        score: the model: figures of the completion's tokens on a canvas.
        prompt: "b p".
        completion: "b t".
        length: positions that the completion was drawn over.
        hidden: "m b p", the masks.
        mask_token: id of the mask token.
        block: positions of a block; None is the one-step estimate.

    >>> uniform = lambda canvas, part: torch.full((1, len(canvas), part.stop - part.start), -1.0986)
    >>> prompt, completion = torch.tensor([[5, 6]]), torch.tensor([[7, 8]])
    >>> masked_estimate(uniform, prompt, completion, 2, torch.zeros(1, 1, 2, dtype=torch.bool), 0)
    tensor([[[-1.0986, -1.0986]]])
    """
    total: Tensor | None = None
    for one in hidden:
        views = canvases(prompt, completion, length, one, mask_token, block)
        figures = torch.cat([score(canvas, part) for canvas, part in views], dim=2)
        total = figures if total is None else total + figures
    if total is None:
        raise ValueError("There is no mask. Expected: at least one mask of the prompt. Given: none. Draw one.")
    return total / len(hidden)
