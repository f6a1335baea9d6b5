"""Checks of the parameters of corrections, shared by the functions and by the callbacks' constructors."""

import math

from jaxtyping import Float
from torch import Tensor

from lit_qrl.errors import ConfigError, nearest

Bound = float | Float[Tensor, ""]


def check_band(lower: float | None, upper: Bound, what: str = "The band of importance ratios") -> float | Tensor:
    """Return the lower bound, 1/upper for None, after checking that 0 <= lower <= 1 <= upper.

    Args:
        lower: on the ratio itself, not its logarithm.
        upper: on the ratio itself; a tensor (a measured bound) is not checked, since that would wait for the device.
        what: how the error names the band.

    Raises:
        ConfigError: the band does not hold 1.

    >>> check_band(None, 4.0)
    0.25
    """
    if isinstance(upper, Tensor):
        return 1.0 / upper if lower is None else lower
    if math.isnan(upper) or upper < 1.0:
        raise ConfigError(
            f"{what} must hold 1, the ratio of equal policies.",
            expected="upper >= 1",
            given=upper,
            remedy="Raise upper; bounds are on the ratio, not its logarithm.",
        )
    if lower is None:
        return 1.0 / upper
    if not 0.0 <= lower <= 1.0:
        raise ConfigError(
            f"{what} must hold 1, the ratio of equal policies.",
            expected="0 <= lower <= 1 <= upper",
            given=f"lower {lower}, upper {upper}",
            remedy="Correct lower; bounds are on the ratio, not its logarithm.",
        )
    return lower


def check_divergence(lower: float | None, upper: Bound) -> None:
    """Raise `ConfigError` unless a divergence has a positive upper bound alone."""
    if lower is not None or not (isinstance(upper, Tensor) or upper > 0):
        raise ConfigError(
            "k2 and k3 are never negative: their rejection has an upper bound alone.",
            expected="upper > 0, in nats, and lower: null",
            given=f"lower {lower}, upper {upper}",
            remedy="Remove lower, or take divergence k1, whose bounds are on the ratio.",
        )


def check_veto(threshold: float) -> None:
    """Raise `ConfigError` unless the veto's threshold is a ratio in (0, 1)."""
    if not 0.0 < threshold < 1.0:
        raise ConfigError(
            "The veto's threshold is a ratio of probabilities.",
            expected="0 < threshold < 1",
            given=threshold,
            remedy="Give the ratio itself, such as 1e-4, not its logarithm.",
        )


def check_delta(delta: float) -> None:
    """Raise `ConfigError` unless the drift that the off-policy mask allows is positive."""
    if not delta > 0:
        raise ConfigError(
            "The drift allowed to a negative sequence must be positive.",
            expected="delta > 0, in nats per token",
            given=delta,
            remedy="Give a value above the mean log-ratio of a healthy run.",
        )


def check_ais(
    clip: float, saturation: float, tolerance: float, sensitivity: float, eps: float, level: str = "token"
) -> None:
    """Raise `ConfigError` for parameters with which the gate means nothing."""
    check_band(0.0, clip, what="The clip of AIS")
    for name, value, allowed in (
        ("saturation", saturation, saturation > 0),
        ("tolerance", tolerance, tolerance > 0),
        ("sensitivity", sensitivity, sensitivity >= 0),
        ("eps", eps, eps > 0),
    ):
        if not allowed:
            expected = f"{name} >= 0" if name == "sensitivity" else f"{name} > 0"
            remedy = "To correct at full strength always, use TruncatedIS." if name == "saturation" else "Correct it."
            raise ConfigError(f"{name} of AIS is out of range.", expected=expected, given=value, remedy=remedy)
    if level not in ("token", "sequence"):
        raise ConfigError("level of AIS is unknown.", expected="token or sequence", given=level, remedy="Correct it.")


def check_clip(**bounds: float | None) -> None:
    """Raise `ConfigError` for a clip that is negative, or a lower one above 1 (ratios are positive)."""
    for name, value in bounds.items():
        top = 1.0 if "low" in name else float("inf")
        if value is not None and not 0.0 <= value <= top:
            raise ConfigError(
                f"{name} is out of range.",
                expected=f"0 <= {name} <= {top}",
                given=value,
                remedy="Give the distance from 1: 0.2 clips at 0.8 or 1.2.",
            )


def check_dual_clip(dual_clip: float | None) -> None:
    """Raise `ConfigError` unless the dual clip is above 1."""
    if dual_clip is not None and not dual_clip > 1.0:
        raise ConfigError(
            "dual_clip bounds the ratio of negative samples.",
            expected="dual_clip > 1",
            given=dual_clip,
            remedy="Give the largest ratio to follow, such as 3.0, or null for none.",
        )


def check_mismatch_cap(mismatch_cap: float) -> None:
    """Raise `ConfigError` unless the cap of TBPO's mismatch weight is above 1."""
    if not mismatch_cap > 1.0:
        raise ConfigError(
            "mismatch_cap bounds the mismatch weight from both sides.",
            expected="mismatch_cap > 1",
            given=mismatch_cap,
            remedy="Give the largest weight, such as 2.0.",
        )


def check_temperatures(*temperatures: float) -> None:
    """Raise `ConfigError` unless all temperatures of SAPO are positive."""
    for temperature in temperatures:
        if not temperature > 0:
            raise ConfigError(
                "A temperature of SAPO is out of range.",
                expected="a positive number",
                given=temperature,
                remedy="The paper uses 1.0 for positive and 1.05 for negative samples.",
            )


def check_clamps(**clamps: float | None) -> None:
    """Raise `ConfigError` for a clamp of the KL that is not positive."""
    for name, value in clamps.items():
        if value is not None and not value > 0:
            raise ConfigError(
                f"{name} bounds the KL's estimate from both sides.",
                expected=f"{name} > 0, in nats",
                given=value,
                remedy="Give a positive number, such as 20 for the input and 10 for the output, or null for none.",
            )


def check_reduction(reduction: str) -> None:
    """Raise `ConfigError` for an unknown reduction."""
    if reduction not in ("sequence", "token", "constant", "sequence_sum", "token_sum"):
        raise ConfigError(
            "Unknown reduction of the loss.",
            expected="sequence, token, constant, sequence_sum or token_sum",
            given=reduction,
            remedy="Correct reduction.",
        )


def check_choice(name: str, value: object, *allowed: object) -> None:
    """Raise `ConfigError` unless the value of the key `name` is one of those allowed."""
    if value not in allowed:
        hint = nearest(str(value), [str(choice) for choice in allowed])
        raise ConfigError(
            f"{name} is unknown.", expected=" or ".join(str(choice) for choice in allowed), given=value, remedy=hint
        )
