"""The schedule of adaptive quantization noise (QeRL)."""

import math
from typing import Literal, get_args

from lit_qrl.errors import check_choice

Schedule = Literal["exponential", "linear", "cosine", "logarithmic"]


def aqn_sigma(stage: int, num_stages: int, start: float, end: float, schedule: Schedule = "exponential") -> float:
    """Return the standard deviation of the noise in one of the stages of training.

    Stage 0 has none (quantization noise alone). With x = (stage − 1) / (num_stages − 2), which runs from 0 at stage 1
    to 1 at the last stage, exponential is start·(end/start)^x. QeRL eq. 8 prints K − 1 in the denominator, which
    never reaches `end`, although §3.3 says "then from σ_start to σ_end". Linear is start + (end − start)·x, cosine
    end + (start − end)(1 + cos πx)/2, logarithmic start + (end − start)·log(stage)/log(num_stages − 1); QeRL §4.2
    names these three without formulas.

    Args:
        stage: in [0, num_stages).
        num_stages: intervals of training, at least 2; with 2, the only noisy stage has σ = start.
        start: σ of stage 1, positive.
        end: σ of the last stage, positive.
        schedule: how σ moves between them.

    Raises:
        ValueError: a stage out of range, fewer than 2 stages, a σ that is not positive.
        ConfigError: an unknown schedule.

    >>> aqn_sigma(9, 10, 1e-2, 5e-4), aqn_sigma(0, 10, 1e-2, 5e-4)
    (0.0005, 0.0)
    """
    if num_stages < 2:
        raise ValueError(f"Too few noise stages. Expected: num_stages >= 2. Given: {num_stages}. Raise num_stages.")
    if not 0 <= stage < num_stages:
        raise ValueError(f"No such noise stage. Expected: 0 <= stage < {num_stages}. Given: {stage}. Clamp it.")
    for name, sigma in (("start", start), ("end", end)):
        if not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(f"A noise level is wrong. Expected: {name} > 0. Given: {sigma}. Give a positive {name}.")
    check_choice("schedule", schedule, get_args(Schedule))
    if stage == 0:
        return 0.0
    if stage == 1:
        return start
    x = (stage - 1) / (num_stages - 2)
    if schedule == "exponential":
        return start * (end / start) ** x
    if schedule == "cosine":
        return end + (start - end) * (1 + math.cos(math.pi * x)) / 2
    if schedule == "logarithmic":
        x = math.log(stage) / math.log(num_stages - 1)
    return start + (end - start) * x
