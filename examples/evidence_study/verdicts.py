"""The hypotheses of docs/studies/evidence.md, each with what the runs say of it: met, missed or not run."""

from collections.abc import Callable, Sequence
from statistics import fmean

from summary import Comparison, Point, Results, differences, level_of

COLLAPSE, ALPHA, NEAR, FITTED_NEAR, AHEAD = 0.30, 0.01, 0.03, 0.05, 0.03
EARLY = 60
"""Iterations in which noise should have explored."""
HABITS = ("cosine", "one_update", "unscaled")


def verdicts(results: Results, compared: Sequence[Comparison], scale: str) -> list[str]:
    """Return a line for each hypothesis.

    Args:
        results: of the study.
        compared: its paired tests.
        scale: the part that names the position of the dial of the first setting.
    """
    bf16, none, aligned = (f"{scale}+none+{sampler}" for sampler in ("bf16", "int4", "int4_aligned"))
    tests = {(one.arm, one.against): one for one in compared}

    def gap(arm: str, against: str) -> float:
        return fmean(differences(results, arm, against))

    def collapse(arm: str, against: str) -> tuple[bool, str]:
        test = tests[arm, against]
        met = test.difference <= -COLLAPSE and test.p_holm < ALPHA
        return met, f"{test.difference:+.3f} ± {test.standard_error:.2g}, p = {test.p_holm:.2g}"

    def repair(name: str) -> tuple[bool, str]:
        arm = f"{scale}+{name}+int4"
        over, under = gap(arm, none), gap(arm, bf16)
        return over > 0 > under, f"{over:+.3f} over no correction, {under:+.3f} to bf16"

    def fitted() -> tuple[bool, str]:
        found = gap(f"{scale}+ais_fitted+int4", f"{scale}+tis+int4")
        return found >= -FITTED_NEAR, f"{found:+.3f} to TIS"

    def near(arm: str) -> tuple[bool, str]:
        found = gap(arm, bf16)
        return abs(found) <= NEAR, f"{found:+.3f} to bf16"

    def best() -> tuple[bool, str]:
        corrected = [arm for arm in results.arms(scale) if arm.endswith("+int4")]
        rival = max(corrected, key=lambda arm: gap(arm, bf16))
        found = gap(aligned, rival)
        return found > 0, f"{found:+.3f} to the best of the others, {rival}"

    def explores() -> tuple[bool, str]:
        ahead = {at: accuracy(results.points, none, at) - accuracy(results.points, bf16, at) for at in early}
        at = max(ahead, key=ahead.__getitem__)
        return ahead[at] < AHEAD, f"at most {ahead[at]:+.3f}, after {at} iterations"

    def hides(habit: str) -> tuple[bool, str]:
        with_it, without = gap(f"{habit}+{none}", f"{habit}+{bf16}"), gap(none, bf16)
        return without < 0 and with_it > without / 2, f"{with_it:+.3f} instead of {without:+.3f}"

    early = sorted({one.iteration for one in results.points if 0 < one.iteration <= EARLY and one.arm == none})
    asked: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("1. without correction the learner loses 0.30", lambda: collapse(none, bf16)),
        ("1. likewise at INT3", lambda: collapse("s4+none+int3", "s4+none+bf16")),
        *((f"2. {name} repairs part of it", lambda name=name: repair(name)) for name in ("tis", "mis", "ais")),
        ("2. AIS with a fitted δ is as good as TIS", fitted),
        ("3. aligned ends where bf16 does", lambda: near(aligned)),
        ("3. and above every correction", best),
        ("4. an FP8 sampler ends where bf16 does", lambda: near(f"{scale}+none+fp8_block")),
        ("4. so does unified FP8", lambda: near(f"{scale}+none+fp8_unified")),
        ("5. quantization noise does not explore", explores),
        *((f"6. {habit} hides the harm", lambda habit=habit: hides(habit)) for habit in HABITS),
    ]
    return [f"- {claim}: {said(answer)}" for claim, answer in asked]


def said(answer: Callable[[], tuple[bool, str]]) -> str:
    """Return the answer in words; one that runs are missing for was not run."""
    try:
        met, figures = answer()
    except (KeyError, ValueError):  # no such comparison; no difference to take the mean of
        return "not run"
    return f"{'met' if met else 'missed'} ({figures})"


def accuracy(points: Sequence[Point], arm: str, iteration: int) -> float:
    """Return the learner's mean accuracy over seeds at an evaluation."""
    found = [one.learner_accuracy for one in points if (one.arm, one.iteration) == (arm, iteration)]
    return fmean(one for one in found if one is not None)


def scale_of(results: Results) -> str | None:
    """Return the setting of INT4 with the most runs, the first one of the study."""
    levels = [level_of(one.arm) for one in results.outcomes if level_of(one.arm) in ("s8", "s10", "s12")]
    return max(set(levels), key=levels.count) if levels else None
