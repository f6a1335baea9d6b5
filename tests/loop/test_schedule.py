from types import SimpleNamespace

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.loop.contracts import Schedule
from lit_qrl.loop.schedule import RolloutPrefetcher, check_ahead, check_in_flight, schedule_of
from lit_qrl.objective import GRPO
from lit_qrl.rollout.embedded.engine import TransformersEngine
from tests.loop.test_ahead import Apart, Flying
from tests.loop.test_turns import Echo


def test_updates_in_flight_are_refused_where_bits_must_repeat_or_an_engine_takes_none(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    learner = SimpleNamespace(data=SimpleNamespace(engine=Flying(), schedule=RolloutPrefetcher(2, "keep")))
    with pytest.raises(ConfigError, match=r"trainer\.deterministic .* in flight"):
        check_in_flight(learner)
    learner.data.engine = Apart()
    with pytest.raises(ConfigError, match="Apart"):
        check_in_flight(learner)
    learner.data.schedule = RolloutPrefetcher(2)
    check_in_flight(learner)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (("async", 0), r"data\.max_staleness does not fit"),
        (("on_policy", 2), r"data\.max_staleness does not fit"),
        (("one_step_off", 2), r"data\.max_staleness does not fit"),
        (("on_policy", 1, "keep"), r"data\.in_flight_updates does not fit data\.schedule"),
        (("one_step_off", 1, "keep"), r"data\.in_flight_updates does not fit data\.schedule"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused(given, key):
    with pytest.raises(ConfigError, match=key):
        schedule_of(*given)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine": TransformersEngine()}, "TransformersEngine, which shares the learner's memory"),
        ({"objective": GRPO(filter_zero_variance=True)}, "filter_zero_variance"),
        ({"denoises": True}, "estimates log-probs again"),
        ({"task": Echo()}, "data.task: Echo, whose environments answer"),
    ],
)
def test_what_cannot_be_drawn_meanwhile_is_refused(changes, named):
    learner = SimpleNamespace(
        data=SimpleNamespace(
            engine=changes.get("engine", Apart()), task=changes.get("task"), schedule=RolloutPrefetcher(1)
        ),
        objective=changes.get("objective", GRPO()),
        policy=SimpleNamespace(denoises=changes.get("denoises", False)),
    )
    with pytest.raises(ConfigError, match=named):
        check_ahead(learner, "one_step_off")


def test_a_schedule_is_made_of_what_says_it():
    assert type(schedule_of("on_policy", 1)) is Schedule
    assert schedule_of("one_step_off", 1).staleness == 1
    assert schedule_of("async", 3, "recompute").in_flight
