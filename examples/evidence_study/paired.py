"""Paired tests over seeds, and what several of them at once may say."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from study_report import standard_error


def t_probability(t: float, freedom: int) -> float:
    """Return the probability that |T| is at least |t|, for Student's T with whole degrees of freedom.

    The finite series of Abramowitz & Stegun, 26.7.3 and 26.7.4.

    >>> round(t_probability(2.776, 4), 3), round(t_probability(2.262, 9), 3)
    (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = total = cosine if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if freedom == 1:
        inside = 2 * angle / math.pi
    elif freedom % 2:
        inside = 2 / math.pi * (angle + sine * total)
    else:
        inside = sine * total
    return max(1.0 - inside, 0.0)


def paired_test(differences: Sequence[float]) -> float:
    """Return the two-sided p of a paired t-test that the mean difference is 0; 1 with fewer than two pairs.

    >>> round(paired_test([0.3, 0.4, 0.5, 0.2, 0.6]), 4)
    0.0048
    """
    if len(differences) < 2:
        return 1.0
    error = standard_error(differences)
    if error == 0.0:
        return 0.0 if any(differences) else 1.0
    return t_probability(fmean(differences) / error, len(differences) - 1)


def holm(probabilities: Mapping[str, float]) -> dict[str, float]:
    """Return p-values of several tests, adjusted so that the chance of any false alarm stays below each (Holm 1979).

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(probabilities, key=probabilities.__getitem__)):
        largest = max(largest, min(1.0, (len(probabilities) - rank) * probabilities[name]))
        adjusted[name] = round(largest, 12)
    return adjusted
