import time

import torch

from lit_qrl.loop.state import IterationState
from lit_qrl.types import MicroBatch, no_all_reduce
from tests.networks import batch_of


def batch():
    made = batch_of([[5], [6]], [[7, 8], [9]])
    made.rewards = torch.tensor([1.0, 3.0])
    made.reward_parts = {"digits": made.rewards / 2}
    return made


def part_of(state, row):
    row = torch.tensor([row])
    return MicroBatch(state.rollout.select(row), torch.tensor(1.0), row, torch.tensor(True))


def test_a_closed_iteration_is_one_row_and_the_row_is_had_once():
    state = IterationState()
    state.metrics.value("noise/sigma", 0.5)
    state.close(no_all_reduce)  # without a rollout it is not closed
    assert state.take_row() == {}
    assert state.metrics.compute(no_all_reduce) == {"noise/sigma": 0.5}
    with state.timed("evaluate"):  # before the first iteration, of which it is a part
        time.sleep(0.01)
    state.start()
    state.rollout = batch()
    with state.timed("rollout"), state.timed("generate"):
        pass
    state.update_begins()
    with state.timed("score"):
        pass
    state.metrics.value("noise/sigma", 0.5)
    state.close(no_all_reduce)
    row = state.take_row()
    assert row["reward/mean"] == 2.0
    assert row["reward/digits"] == 1.0
    assert row["rollout/length"] == 1.5
    assert row["noise/sigma"] == 0.5
    parts = row["time/rollout"] + row["time/score"] + row["time/update"] + row["time/other"] + row["time/evaluate"]
    assert abs(parts - row["time/iteration"]) < 1e-5
    assert min(row["time/other"], row["time/iteration"] - row["time/evaluate"]) >= 0
    assert row["time/generate"] <= row["time/rollout"]  # a part of it, counted once
    assert state.rollout is None
    assert not state.seconds
    assert state.take_row() == {}


def test_the_training_forward_is_learner_old_where_nothing_else_scored_it():
    state = IterationState()
    state.rollout = batch()
    part = part_of(state, 1)
    assert state.measured() is state.rollout
    state.remember_old(part, torch.tensor([[-0.5]]))
    measured = state.measured()
    assert measured.learner_old_logprobs.tolist() == [[0.0, 0.0], [-0.5, 0.0]]
    assert measured.mask.tolist() == [[False, False], [True, False]]  # of the other nothing is known
    assert state.rollout.mask.tolist() == [[True, True], [True, False]]
    state.remember_old(part_of(state, 0), torch.tensor([[-1.0, -2.0]]))
    assert state.measured().learner_old_logprobs.tolist() == [[-1.0, -2.0], [-0.5, 0.0]]
    assert torch.equal(state.measured().mask, state.rollout.mask)


def test_what_was_scored_is_not_taken_from_the_training_forward():
    state = IterationState()
    state.rollout = batch()
    state.rollout.learner_old_logprobs = torch.zeros(2, 2)
    state.remember_old(part_of(state, 1), -torch.ones(1, 1))
    assert state.measured() is state.rollout
    assert torch.equal(state.rollout.learner_old_logprobs, torch.zeros(2, 2))


def test_what_runs_between_two_iterations_belongs_to_the_second(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("lit_qrl.loop.state.time.perf_counter", lambda: float(next(now)))
    state = IterationState()
    state.start()  # 0
    for _ in range(2):
        state.rollout = batch()
        with state.timed("rollout"):  # one second
            pass
        state.close(no_all_reduce)
        with state.timed("checkpoint"):  # one second, and one before and after each phase
            pass
        state.start()
    row = state.take_row()
    took = [row[f"time/{name}"] for name in ("checkpoint", "rollout", "iteration", "other")]
    assert took == [1.0, 1.0, 5.0, 3.0]
