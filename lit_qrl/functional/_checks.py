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


def _require(good: bool, said: str, expected: str, given: object, remedy: str) -> None:
    if not good:
        raise ConfigError(said, expected=expected, given=given, remedy=remedy)


def check_divergence(lower: float | None, upper: Bound) -> None:
    """Raise `ConfigError` unless a divergence has a positive upper bound alone."""
    _require(
        lower is None and (isinstance(upper, Tensor) or upper > 0),
        "k2 and k3 are never negative: their rejection has an upper bound alone.",
        "upper > 0, in nats, and lower: null",
        f"lower {lower}, upper {upper}",
        "Remove lower, or take divergence k1, whose bounds are on the ratio.",
    )


def check_veto(threshold: float) -> None:
    """Raise `ConfigError` unless the veto's threshold is a ratio in (0, 1)."""
    said, remedy = (
        "The veto's threshold is a ratio of probabilities.",
        "Give the ratio itself, such as 1e-4, not its logarithm.",
    )
    _require(0.0 < threshold < 1.0, said, "0 < threshold < 1", threshold, remedy)


def check_delta(delta: float) -> None:
    """Raise `ConfigError` unless the drift that the off-policy mask allows is positive."""
    said = "The drift allowed to a negative sequence must be positive."
    remedy = "Give a value above the mean log-ratio of a healthy run."
    _require(delta > 0, said, "delta > 0, in nats per token", delta, remedy)


def check_ais(
    clip: float, saturation: float, tolerance: float, sensitivity: float, eps: float, level: str = "token"
) -> None:
    """Raise `ConfigError` for parameters with which the gate means nothing."""
    check_band(0.0, clip, what="The clip of AIS")
    remedies = {"saturation": "To correct at full strength always, use TruncatedIS."}
    for name, value in (("saturation", saturation), ("tolerance", tolerance), ("eps", eps)):
        _require(value > 0, f"{name} of AIS is out of range.", f"{name} > 0", value, remedies.get(name, "Correct it."))
    _require(sensitivity >= 0, "sensitivity of AIS is out of range.", "sensitivity >= 0", sensitivity, "Correct it.")
    _require(level in ("token", "sequence"), "level of AIS is unknown.", "token or sequence", level, "Correct it.")


def check_clip(**bounds: float | None) -> None:
    """Raise `ConfigError` for a clip that is negative, or a lower one above 1 (ratios are positive)."""
    for name, value in bounds.items():
        top = 1.0 if "low" in name else float("inf")
        good, remedy = value is None or 0.0 <= value <= top, "Give the distance from 1: 0.2 clips at 0.8 or 1.2."
        _require(good, f"{name} is out of range.", f"0 <= {name} <= {top}", value, remedy)


def check_dual_clip(dual_clip: float | None) -> None:
    """Raise `ConfigError` unless the dual clip is above 1."""
    good, said = dual_clip is None or dual_clip > 1.0, "dual_clip bounds the ratio of negative samples."
    remedy = "Give the largest ratio to follow, such as 3.0, or null for none."
    _require(good, said, "dual_clip > 1", dual_clip, remedy)


def check_mismatch_cap(mismatch_cap: float) -> None:
    """Raise `ConfigError` unless the cap of TBPO's mismatch weight is above 1."""
    said = "mismatch_cap bounds the mismatch weight from both sides."
    _require(mismatch_cap > 1.0, said, "mismatch_cap > 1", mismatch_cap, "Give the largest weight, such as 2.0.")


def check_temperatures(*temperatures: float) -> None:
    """Raise `ConfigError` unless all temperatures of SAPO are positive."""
    remedy = "The paper uses 1.0 for positive and 1.05 for negative samples."
    for temperature in temperatures:
        said = "A temperature of SAPO is out of range."
        _require(temperature > 0, said, "a positive number", temperature, remedy)


def check_clamps(**clamps: float | None) -> None:
    """Raise `ConfigError` for a clamp of the KL that is not positive."""
    remedy = "Give a positive number, such as 20 for the input and 10 for the output, or null for none."
    for name, value in clamps.items():
        said = f"{name} bounds the KL's estimate from both sides."
        _require(value is None or value > 0, said, f"{name} > 0, in nats", value, remedy)


def check_choice(name: str, value: object, *allowed: object) -> None:
    """Raise `ConfigError` unless the value of the key `name` is one of those allowed."""
    if value not in allowed:
        hint = nearest(str(value), [str(choice) for choice in allowed])
        raise ConfigError(
            f"{name} is unknown.", expected=" or ".join(str(choice) for choice in allowed), given=value, remedy=hint
        )
