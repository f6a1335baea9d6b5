"""How good a policy is on a set of problems: pass@k without bias, and how far it can be trusted."""

import torch
from torch import Tensor

NORMAL_QUANTILE = 1.959964
"""Of a two-sided interval of 95 %."""


def pass_at_k(correct: Tensor, k: int) -> Tensor:
    """Return for each problem " problems" (fp64) the probability that one of `k` samples is correct, without bias.

    1 − C(n−c, k) / C(n, k) with c correct among n samples: Chen et al. 2021, *Evaluating Large Language Models Trained
    on Code*, arXiv:2107.03374, eq. 1. For k = 1 it is the share of correct samples, avg@n.

    Args:
        correct: "problems n", True where a sample solves its problem.
        k: at most n.

    Raises:
        ValueError: when there are fewer than `k` samples.

    >>> pass_at_k(torch.tensor([[True, False, False, False]]), 2)
    tensor([0.5000], dtype=torch.float64)
    """
    n = correct.shape[1]
    if n < k:
        raise ValueError(f"pass@{k} needs at least {k} samples per problem, got {n}.")
    wrong = n - correct.double().sum(dim=1)
    return 1 - torch.stack([((wrong - i) / (n - i)).clamp(min=0) for i in range(k)]).prod(dim=0)


def effective_size(total: Tensor, squares: Tensor, problems: Tensor, draws: int) -> Tensor:
    """Return how many independent trials tell as much of a mean as these problems do.

    p (1 − p) / Var(p), the sample size over the design effect (Kish 1965, *Survey Sampling*, 8.2), with the variance of
    the mean over problems, each a cluster of its draws: so draws of one problem that agree do not count as new
    evidence. With one draw of each it is the number of problems; it lies between that and the number of draws.

    Args:
        total: sum over problems of their values, each in [0, 1].
        squares: sum of the squared values.
        problems: how many.
        draws: independent values behind each problem's.

    >>> effective_size(torch.tensor(3.0), torch.tensor(3.0), torch.tensor(4), draws=1)
    tensor(4.)
    """
    mean = total / problems
    variance = (squares / problems - mean * mean).clamp(min=0) / problems
    size = mean * (1 - mean) / variance
    # Without any variance there is nothing to divide by: all problems solved or none, or all equally often.
    return torch.where(size.isnan(), problems.to(size), size).clamp(problems, problems * draws)


def wilson_interval(mean: Tensor, size: Tensor, quantile: float = NORMAL_QUANTILE) -> tuple[Tensor, Tensor]:
    """Return the lower and upper end of a proportion's score interval, of 95 % by default.

    Wilson 1927, *Probable Inference, the Law of Succession, and Statistical Inference*, JASA 22; with an effective size
    it is the interval that Dean & Pagano 2015 (J. Survey Statistics and Methodology 3) recommend for clustered draws.

    Args:
        mean: the proportion.
        size: trials, or how many they are worth (`effective_size`).
        quantile: of the standard normal distribution.

    >>> low, high = wilson_interval(torch.tensor(0.5), torch.tensor(10.0))
    >>> round(float(low), 3), round(float(high), 3)
    (0.237, 0.763)
    """
    shrunk = quantile * quantile / size
    centre = (mean + shrunk / 2) / (1 + shrunk)
    half = (mean * (1 - mean) * shrunk + shrunk * shrunk / 4).clamp(min=0).sqrt() / (1 + shrunk)
    return (centre - half).clamp(min=0.0), (centre + half).clamp(max=1.0)
