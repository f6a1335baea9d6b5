"""Which schedules of drawing and updating there are, and what a run cannot have beside them."""

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.loop.hooks import Learner
from lit_qrl.loop.record import FlightRecord, settings_of
from lit_qrl.loop.turns import TakesTurns
from lit_qrl.rollout.pauses import Pauses


def staleness_of(schedule: str, max_staleness: int, in_flight: str = "none", replay: str | None = None) -> int:
    """Return by how many iterations a schedule's weights may be older; 0 draws and updates in turns.

    Args:
        schedule: `on_policy`, `one_step_off` or `async`.
        max_staleness: of `async`.
        in_flight: what becomes of keys and values when weights come while completions are drawn.
        replay: the run folder whose record is followed.

    Raises:
        ConfigError: for another schedule, or a staleness, updates or a record that do not fit it.

    >>> staleness_of("one_step_off", 1), staleness_of("async", 4)
    (1, 4)
    """
    if schedule not in ("on_policy", "one_step_off", "async"):
        raise ConfigError("data.schedule is unknown.", expected="on_policy, one_step_off or async", given=schedule)
    if max_staleness < 1 or (schedule != "async" and max_staleness != 1):
        raise ConfigError(
            "data.max_staleness does not fit data.schedule.",
            expected="1 or more with schedule async, else nothing",
            given=f"{max_staleness} with {schedule}",
            remedy="Set data.schedule to async, or leave max_staleness out.",
        )
    if in_flight not in ("none", "keep", "recompute") or (in_flight != "none" and schedule != "async"):
        raise ConfigError(
            "data.in_flight_updates does not fit data.schedule.",
            expected="none, or with schedule async keep or recompute",
            given=f"{in_flight} with {schedule}",
            remedy="Set data.schedule to async, or leave in_flight_updates out.",
        )
    if replay is not None and in_flight == "none":
        raise ConfigError(
            "data.replay follows a run whose weights came in flight; every other run repeats by itself.",
            expected="data.in_flight_updates: keep or recompute",
            given=f"none with data.replay: {replay}",
            remedy="Leave data.replay out, and start the same configuration again.",
        )
    return max_staleness if schedule == "async" else int(schedule == "one_step_off")


def check_ahead(learner: Learner, schedule: str) -> None:
    """Raise `ConfigError` where rollouts cannot be drawn while the learner updates.

    Args:
        learner: with engine, objective and policy.
        schedule: for the error.
    """
    engine, objective = learner.data.engine, learner.objective
    for differs, expected, given, remedy in (
        (
            not engine.overlaps,
            "an engine in a process of its own",
            f"data.engine: {type(engine).__name__}, which shares the learner's memory",
            "Put it into data.engine: RemoteEngine.",
        ),
        (
            objective.filter_zero_variance,
            "an objective that takes every group",
            "filter_zero_variance, which draws again when rewards are known",
            "Set it to false, or data.schedule to on_policy.",
        ),
        (
            isinstance(learner.data.task, TakesTurns),
            "completions of one turn",
            f"data.task: {type(learner.data.task).__name__}, whose environments answer while it draws",
            "Set data.schedule to on_policy.",
        ),
        (
            learner.policy.denoises,
            "a causal policy",
            f"{type(learner.policy).__name__}, whose sampler estimates log-probs again for each pass",
            "Set data.schedule to on_policy.",
        ),
    ):
        if differs:
            raise ConfigError(
                f"data.schedule: {schedule} draws rollouts while the learner updates, which this run cannot.",
                expected=expected,
                given=given,
                remedy=remedy,
            )
    check_in_flight(learner)
    ahead = learner.data.ahead
    if ahead is not None and ahead.in_flight:
        ahead.record = FlightRecord(settings_of(learner))
        if ahead.replay is not None:
            ahead.replay.check(ahead.record.settings, learner.trainer.world_size)


def check_in_flight(learner: Learner) -> None:
    """Raise `ConfigError` where weights cannot come while completions are drawn, though they should.

    Args:
        learner: with its engine.
    """
    data, engine = learner.data, learner.data.engine
    if data.ahead is None or not data.ahead.in_flight:
        return
    given, invariant = type(getattr(engine, "engine", engine)).__name__, engine.batch_invariant
    remedy = "Leave data.in_flight_updates out."
    if not (engine.takes_in_flight and isinstance(engine, Pauses)):
        raise ConfigError(
            "data.in_flight_updates gives the engine weights between two of its steps, which it cannot take.",
            expected="TransformersEngine or VLLMEngine in data.engine: RemoteEngine",
            given=given,
            remedy=remedy,
        )
    if data.ahead.replay is None and torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            "trainer.deterministic asks for the same bits in every run, and time says which weights draw which token "
            "where they come in flight.",
            expected="data.in_flight_updates: none, or data.replay, which follows another run's record of it",
            remedy="Leave it out: data.schedule: async alone draws the same in every run.",
        )
    if invariant:
        raise ConfigError(
            "data.engine.batch_invariant promises that learner and sampler agree to the last bit; no learner agrees "
            "with a completion that two versions drew.",
            expected="data.in_flight_updates: none",
            given=f"{given} with batch_invariant: true",
            remedy=remedy,
        )
