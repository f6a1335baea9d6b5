import logging
import math

import pytest
import torch

from lit_qrl.errors import ConfigError, StoppedError
from lit_qrl.rewards import ConstantReward, Reward, Sample, score_all
from lit_qrl.rewards.base import as_tensor, check_row
from tests.default_dtype import bf16_default

SAMPLES = [Sample("q", text) for text in ("a", "bb", "ccc")]


class Length(Reward):
    name = "length"

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, samples):
        return [float(len(sample.completion)) for sample in samples]


class Returns(Reward):
    def __init__(self, value) -> None:
        self.value = value

    def __call__(self, samples):
        return self.value


class RaisesOn(Length):
    name = "picky"
    batched = False

    def __init__(self, text: str) -> None:
        self.text, self.calls = text, 0

    def __call__(self, samples):
        self.calls += 1
        if any(sample.completion == self.text for sample in samples):
            raise RuntimeError("no such text")
        return super().__call__(samples)


def test_total_is_the_weighted_sum_and_parts_are_unweighted():
    scores = score_all([Length(weight=0.5), ConstantReward(2.0, weight=-1.0)], SAMPLES)
    assert scores.total == [0.5 - 2.0, 1.0 - 2.0, 1.5 - 2.0]
    assert scores.parts == {"length": [1.0, 2.0, 3.0], "constant": [2.0, 2.0, 2.0]}
    assert scores.errors == 0


def test_failures_that_a_reward_lists_cost_their_samples_beside_those_that_raise():
    class Late(RaisesOn):
        def __call__(self, samples):
            self.failures = {}
            scores = super().__call__(samples)
            self.failures = {i: "late" for i, sample in enumerate(samples) if sample.completion == "ccc"}
            return [math.nan if score == 2 and self.text == "a" else score for score in scores]

    late = Late("nothing")
    late.batched = True
    scores = score_all([late], SAMPLES, error_reward=-5.0)
    assert (scores.total, scores.errors) == ([1.0, 2.0, -5.0], 1)
    scores = score_all([Late("bb")], SAMPLES, error_reward=-5.0)  # called for one sample at a time
    assert (scores.total, scores.errors) == ([1.0, -5.0, -5.0], 2)
    other = RaisesOn("bb")
    other.name = "other"
    assert score_all([Late("bb"), other], SAMPLES).errors == 2  # of a sample that fails twice one is counted
    with pytest.raises(ConfigError, match="not a finite number"):
        score_all([Late("a")], SAMPLES)


def test_a_reward_that_raises_costs_only_its_sample(caplog):
    with caplog.at_level(logging.WARNING):
        total, parts, errors = score_all([ConstantReward(10.0), RaisesOn("bb")], SAMPLES, error_reward=-1.0)
    assert total == [11.0, -1.0, 13.0]
    assert parts == {"constant": [10.0, 10.0, 10.0], "picky": [1.0, -1.0, 3.0]}
    assert errors == 1
    assert "picky" in caplog.text
    assert "no such text" in caplog.text


@pytest.mark.parametrize("value", [[1.0, 2.0], [1.0] * 4, [], None, 3.0, "abc", {1: 1, 2: 2, 3: 3}])
def test_a_wrong_number_of_scores_is_an_error_that_names_the_reward(value):
    with pytest.raises(ConfigError, match=r"'Returns'.*wrong number.*Expected: 3"):
        score_all([Returns(value)], SAMPLES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "one", "1.0", 10**400, [1.0, 2.0], 1e308, -1e19])
def test_a_score_that_is_no_finite_number_is_an_error_that_names_the_reward(value):
    with pytest.raises(ConfigError, match=r"'Returns'.*not a finite number.*for sample 1"):
        score_all([Returns([1.0, value, 1.0])], SAMPLES)


def test_tensors_and_booleans_are_scores():
    assert score_all([Returns(torch.tensor([1.0, 0.0, 2.0]))], SAMPLES).total == [1.0, 0.0, 2.0]
    assert score_all([Returns([True, False, True])], SAMPLES).total == [1.0, 0.0, 1.0]


def test_an_interrupt_is_not_taken_for_a_failed_sample():
    class Interrupted(Length):
        def __call__(self, samples):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_all([Interrupted()], SAMPLES)


def test_names_are_distinct_and_there_is_a_reward():
    with pytest.raises(ConfigError, match="both named 'constant'"):
        score_all([ConstantReward(), ConstantReward()], SAMPLES)
    with pytest.raises(ConfigError, match="no reward"):
        score_all([], SAMPLES)


class Judge(Length):
    """A slow service: it has all samples in one call, and fails when it is told to."""

    name = "judge"

    def __init__(self, fails=()) -> None:
        self.fails, self.calls = set(fails), 0

    def __call__(self, samples):
        self.calls += 1
        if self.calls in self.fails:
            raise ConnectionError("service is away")
        return super().__call__(samples)


def test_a_batch_that_raises_is_not_scored_again_and_all_of_it_has_failed(caplog):
    judge = Judge(fails=[2])
    assert score_all([judge], SAMPLES).total == [1.0, 2.0, 3.0]
    with caplog.at_level(logging.WARNING):
        scores = score_all([judge], SAMPLES, error_reward=-1.0)
    assert (scores.total, scores.errors, judge.calls) == ([-1.0] * 3, 3, 2)
    assert "'judge' failed on 3 of 3 samples" in caplog.text
    assert "service is away" in caplog.text
    assert score_all([judge], SAMPLES).errors == 0


def test_a_first_call_that_raises_is_a_mistake_that_is_named():
    with pytest.raises(
        ConfigError, match=r"'judge' \(Judge\) failed on the first 3 samples: ConnectionError: service is"
    ):
        score_all([Judge(fails=[1])], SAMPLES)


def test_a_service_that_stays_away_stops_the_run():
    judge = Judge(fails=[2, 3, 5, 6, 7])
    for errors in (0, 3, 3, 0, 3, 3):
        assert score_all([judge], SAMPLES).errors == errors
    with pytest.raises(StoppedError, match="failed 3 times in a row"):
        score_all([judge], SAMPLES)


def test_none_leaves_a_sample_out_of_its_group():
    samples = [Sample(prompt, "") for prompt in "aaabbbccc"]
    some = Returns([1.0, None, 0.0, None, None, None, None, None, None])
    other = Returns([None, None, None, 2.0, 3.0, 4.0, None, None, None])
    other.name = "other"
    scores = score_all([some, other], samples, group_size=3)
    assert scores.total == [1.0, None, 0.0, 2.0, 3.0, 4.0, None, None, None]
    assert scores.errors == 0
    # With one that scores all, a sample that another judged in its group only is not compared with them.
    scores = score_all([some, ConstantReward(5.0)], samples, group_size=3)
    assert scores.total == [6.0, None, 5.0, *[5.0] * 6]
    assert as_tensor(scores.total).isnan().tolist() == [False, True, *[False] * 7]


def test_a_row_that_cannot_be_scored_is_named():
    class Refusing(Length):
        def unscorable(self, sample):
            return "it has no answer" if sample.reference is None else None

    check_row([Length(), Refusing()], Sample("", "", 5), "Row 3")
    with pytest.raises(ConfigError, match=r"Row 3 cannot be scored by Reward 'length' \(Refusing\): it has no answer"):
        check_row([Length(), Refusing()], Sample("", "", None), "Row 3")


def test_scores_keep_their_digits_while_a_learner_in_bf16_predicts():
    with bf16_default():
        found = as_tensor([0.1, 0.999, None])
    assert found.dtype == torch.float32
    assert found[:2].tolist() == pytest.approx([0.1, 0.999], abs=1e-7)
