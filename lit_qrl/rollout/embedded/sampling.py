"""How the next token is drawn from logits, with its log-prob under the very distribution it was drawn from."""

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats.kernels import dispatch
from lit_qrl.seeding import derive_seed
from lit_qrl.types import SamplingParams


def check_sampling(sampling: SamplingParams) -> None:
    """Raise `ConfigError` for sampling parameters outside their range."""
    limits = (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature >= 0, "0 (greedy) or a positive number"),
        ("top_p", 0 < sampling.top_p <= 1, "a number in (0, 1]"),
        ("top_k", sampling.top_k >= 0, "0 (all) or a positive number"),
    )
    for name, good, expected in limits:
        if not good:
            raise ConfigError(f"sampling.{name} is out of range.", expected=expected, given=getattr(sampling, name))


def uniforms(seed: int, prompt: int, n: int, steps: int) -> Tensor:
    """Return uniform numbers "n steps" in [0, 1) that depend on seed and prompt alone, not on the batch they are in.

    Args:
        seed: of the generation call.
        prompt: position of the prompt, in the call or among those that several processes share.
        n: completions of the prompt.
        steps: tokens to draw; a larger number extends the rows.

    >>> torch.equal(uniforms(0, 3, 2, 4), uniforms(0, 3, 2, 6)[:, :4])
    True
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "prompt", prompt))
    # Step-major, so that a longer limit keeps the earlier numbers. In fp32 whatever the default dtype: Lightning's
    # bf16-true makes that bf16 while it evaluates, whose 256 numbers below 1 give a rare token too often or never.
    return torch.rand(steps, n, generator=generator, dtype=torch.float32).T


def running_sums(shares: Tensor) -> Tensor:
    """Return the sums of numbers in [0, 1] over the last dimension up to each.

    A deterministic Trainer adds them as multiples of 2⁻⁴⁰, since integers add up to the same in any order.

    >>> running_sums(torch.tensor([0.5, 0.25]))
    tensor([0.5000, 0.7500])
    """
    if not torch.are_deterministic_algorithms_enabled():
        return shares.cumsum(dim=-1)
    return (shares.double() * 2.0**40).long().cumsum(dim=-1).double() * 2.0**-40


def truncate(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return scores "b v" with −inf outside the kept set: the k likeliest, then the smallest set of mass top_p.

    Args:
        scores: "b v", logits after temperature.
        top_k: number of words kept; 0 keeps all.
        top_p: probability mass kept, in (0, 1]; the word that reaches it is kept.

    >>> truncate(torch.tensor([[2.0, 1.0, 0.0]]), 0, 0.7)
    tensor([[2., 1., -inf]])
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if 0 < top_k < scores.shape[-1]:
        dropped[:, top_k:] = True
    if top_p < 1:
        probabilities = ordered.masked_fill(dropped, -torch.inf).softmax(dim=-1)
        before = running_sums(probabilities) - probabilities
        dropped |= before >= top_p
        dropped[:, 0] = False
    return scores.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)


class TokenSampler:
    """Draws tokens from logits by inverting the cumulative distribution.

    Args:
        sampling: temperature and truncation.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.greedy = sampling.temperature == 0
        self.temperature = 1.0 if self.greedy else sampling.temperature
        self.top_p, self.top_k = (1.0, 0) if self.greedy else (sampling.top_p, sampling.top_k)

    def processed(self, logits: Tensor) -> Tensor:
        """Return the fp32 scores "b v" that tokens are drawn from, −inf outside of the kept set."""
        scores = logits.float()
        if self.temperature != 1.0:
            scores = scores / self.temperature
        if self.top_k or self.top_p < 1:
            scores = truncate(scores, self.top_k, self.top_p)
        return scores

    def drawn(self, logits: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return tokens " b" and their fp32 log-probs " b", as `draw` gives them of the processed logits.

        A GPU finds them without writing down a running sum over all words, whose rounding differs.

        Args:
            logits: "b v".
            uniform: as `draw` takes it.
        """
        whole = not self.top_k and self.top_p == 1
        if uniform is not None and whole and dispatch.available(logits, "drawing"):
            from lit_qrl.rollout.embedded import sampling_triton

            return sampling_triton.draw(logits, uniform, self.temperature)
        return self.draw(self.processed(logits), uniform)

    def draw(self, scores: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return tokens " b" and their fp32 log-probs " b" under the processed distribution (greedy: at T = 1).

        Args:
            scores: "b v", processed.
            uniform: " b", in [0, 1); None is greedy.
        """
        top = scores.amax(dim=-1, keepdim=True)
        mass = (scores - top).exp_()
        normalizer = mass.sum(dim=-1).log() + top[:, 0]
        if uniform is None:
            tokens = scores.argmax(dim=-1)
        else:
            cumulative = running_sums(mass)
            # `right` skips words of mass 0; the total is scaled down so that rounding never passes the last word.
            threshold = uniform[:, None] * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=scores.shape[-1] - 1)
        return tokens, scores.gather(1, tokens[:, None])[:, 0] - normalizer
