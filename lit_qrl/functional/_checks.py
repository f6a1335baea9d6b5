"""Checks of the parameters of corrections, shared by the functions and by the callbacks' constructors."""

from jaxtyping import Float
from torch import Tensor

from lit_qrl.errors import ConfigError, check_choice

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
    if not (upper >= 1.0 and (lower is None or 0.0 <= lower <= 1.0)):
        raise ConfigError(
            f"{what} must hold 1, the ratio of equal policies.",
            expected="0 <= lower <= 1 <= upper",
            given=f"lower {lower}, upper {upper}",
            remedy="Correct them; bounds are on the ratio, not its logarithm.",
        )
    return 1.0 / upper if lower is None else lower


def check_divergence(lower: float | None, upper: Bound) -> None:
    """Raise `ConfigError` unless a divergence has a positive upper bound alone."""
    if not (lower is None and (isinstance(upper, Tensor) or upper > 0)):
        raise ConfigError(
            "k2 and k3 are never negative: their rejection has an upper bound alone.",
            expected="upper > 0, in nats, and lower: null",
            given=f"lower {lower}, upper {upper}",
            remedy="Remove lower, or take divergence k1, whose bounds are on the ratio.",
        )


def check_above(least: float, **values: float | None) -> None:
    """Raise `ConfigError` for a value that is not above `least`; None is one that is not used."""
    for name, value in values.items():
        if value is not None and not value > least:
            raise ConfigError(
                f"{name} is out of range.", expected=f"{name} > {least:g}", given=value, remedy=f"Raise {name}."
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


def check_ais(
    clip: float, saturation: float, tolerance: float, sensitivity: float, eps: float, level: str = "token"
) -> None:
    """Raise `ConfigError` for parameters with which the gate means nothing."""
    check_band(0.0, clip, what="The clip of AIS")
    check_above(0.0, saturation=saturation, tolerance=tolerance, eps=eps)
    if not sensitivity >= 0:
        raise ConfigError("sensitivity of AIS is negative.", expected="sensitivity >= 0", given=sensitivity)
    check_choice("level of AIS", level, ("token", "sequence"))


def check_clip(**bounds: float | None) -> None:
    """Raise `ConfigError` for a clip that is negative, or a lower one above 1 (ratios are positive)."""
    for name, value in bounds.items():
        top = 1.0 if "low" in name else float("inf")
        if not (value is None or 0.0 <= value <= top):
            remedy = "Give the distance from 1: 0.2 clips at 0.8 or 1.2."
            raise ConfigError(f"{name} is out of range.", expected=f"0 <= {name} <= {top}", given=value, remedy=remedy)
