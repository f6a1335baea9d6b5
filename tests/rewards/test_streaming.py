"""Rewards that work while a rollout is drawn return what one call with all samples returns."""

import threading
from unittest import mock

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rewards import FunctionReward, MathReward, Reward, Sample, score_all
from lit_qrl.rewards import service as reward_service
from lit_qrl.rewards.streaming import StreamingRewards
from lit_qrl.types import Completion

SAMPLES = [Sample("", text, "1/2") for text in ("a", "bb", "ccc", "dddd", "eeeee", "ffffff")]


def drawn(*tokens):
    return Completion(token_ids=list(tokens), logprobs=[0.0] * len(tokens), finish_reason="stop", version=0)


def streaming(rewards, sample=lambda number, completion: SAMPLES[number]):
    return StreamingRewards(rewards, sample)


def length(completions):
    return [float(len(completion)) for completion in completions]


class Own(Reward):
    """Its scores are of each sample alone; notes how it was called."""

    name, overlaps = "own", True

    def __init__(self, refuses=""):
        self.refuses, self.calls = refuses, []

    def __call__(self, samples):
        self.calls.append(len(samples))
        if any(sample.completion == self.refuses for sample in samples):
            raise ValueError("as the test wants")
        self.failures = {i: "short" for i, one in enumerate(samples) if one.completion == "a"}
        return [float(len(sample.completion)) for sample in samples]


def scored(rewards, order, added=6, **options):
    """Scores with the first of an order added one by one before the whole is asked for."""
    early = streaming(rewards)
    for i in order[:added]:
        early({i: drawn(0)})
    try:
        return score_all(rewards, SAMPLES, begun=early.begun, group_size=3, **options)
    finally:
        early.close()


@pytest.mark.parametrize("added", [0, 3, 6])
def test_the_order_in_which_samples_come_changes_nothing(added):
    order = [4, 1, 5, 0, 3, 2]

    def rewards():
        return [FunctionReward(length, concurrency=2), Own(), MathReward(workers=1)]

    wanted = score_all(rewards(), SAMPLES, error_reward=-1.0, group_size=3)
    assert scored(rewards(), order, added, error_reward=-1.0) == wanted
    assert wanted.errors == 1
    assert wanted.total[0] == -1.0


def test_rewards_that_want_all_samples_at_once_are_left_alone():
    class Whole(Own):
        overlaps = False

    one, plain = Whole(), FunctionReward(length)
    assert not streaming([one, plain]).begun
    early = streaming([one, FunctionReward(length, concurrency=1)])
    early({0: drawn(0)})
    score_all(early._rewards, SAMPLES, begun=early.begun)
    assert one.calls == [len(SAMPLES)]


def test_a_sample_is_scored_before_the_next_one_is_there():
    was_called = threading.Event()

    def judge(completions):
        was_called.set()
        return length(completions)

    class Told(Own):
        def __call__(self, samples):
            return judge([sample.completion for sample in samples])

    for reward in (FunctionReward(judge, concurrency=4), Told()):
        was_called.clear()
        early = streaming([reward])
        early({2: drawn(0)})
        assert was_called.wait(30)
        assert early.begun[reward.name].scores(SAMPLES) == length([one.completion for one in SAMPLES])
        assert early.seconds > 0


def test_errors_come_as_without(monkeypatch):
    monkeypatch.setattr(reward_service, "FIRST_PAUSE", 0.001)

    def broken(completions):
        raise ValueError("never works")

    for kind in (lambda: FunctionReward(broken, concurrency=2), lambda: Own("ccc")):
        told = []
        for run in (lambda reward: score_all([reward], SAMPLES), lambda reward: scored([reward], range(6))):
            with pytest.raises(ConfigError) as caught:
                run(kind())
            told.append(str(caught.value))
        assert told[0] == told[1]
        assert "failed on the first 6 samples" in told[0]


def test_a_function_that_is_late_fails_alone():
    never = threading.Event()

    def judge(completions):
        if completions == ["bb"]:
            never.wait(60)
        return length(completions)

    reward = FunctionReward(judge, concurrency=6, timeout=1.0, retries=0)
    scores = scored([reward], range(6), error_reward=-1.0)
    never.set()
    assert scores.total == [1.0, -1.0, 3.0, 4.0, 5.0, 6.0]
    assert list(reward.failures) == [1]


def test_what_is_dropped_is_begun_anew():
    reward = FunctionReward(length, concurrency=1)
    early = streaming([reward])
    early({0: drawn(9)})
    early.again()
    early({1: drawn(0)})
    assert score_all([reward], SAMPLES[:2], begun=early.begun).total == [1.0, 2.0]
    early.close()


def test_a_reward_that_returns_too_few_scores_is_an_error():
    class Few(Own):
        def __call__(self, samples):
            return [1.0]

    one = Few()
    early = streaming([one])
    early({0: drawn(0), 1: drawn(1)})
    with pytest.raises(ConfigError, match="returned 1 scores for 2 samples"):
        score_all([one], SAMPLES[:2], begun=early.begun)


def test_what_is_drawn_again_is_scored_when_the_call_under_way_has_returned():
    inside, most, entered, goes_on = [], [], threading.Event(), threading.Event()

    class Slow(Own):
        def __call__(self, samples):
            inside.append(samples)
            most.append(len(inside))
            entered.set()
            goes_on.wait(30)
            inside.pop()
            return super().__call__(samples)

    early = streaming([Slow()])
    early({0: drawn(0)})
    assert entered.wait(30)
    entered.clear()
    early.again()  # the engine died
    early({0: drawn(0)})
    second = entered.wait(0.1)
    goes_on.set()
    scores = early.begun["own"].scores(SAMPLES)
    assert not second
    assert (most[:2], max(most)) == ([1, 1], 1)
    assert scores == [float(i) for i in range(1, 7)]
    assert list(early._rewards[0].failures) == [0]


class Noted(Own):
    """Notes what is handed over."""

    def begin(self):
        self.begun = mock.Mock(seconds=1.5)
        return self.begun


def test_completions_are_handed_on_once_and_forgotten_where_others_were_drawn():
    reward = Noted()
    judging = streaming([reward], lambda number, completion: (number, completion.token_ids))
    first = reward.begun
    judging({2: drawn(5)})
    judging({2: drawn(5), 0: drawn(6)})
    assert first.add.mock_calls == [mock.call({2: (2, [5])}), mock.call({0: (0, [6])})]
    assert judging.begun_with(all_drawn := [drawn(6), drawn(7), drawn(5)]) == {"own": first}
    assert judging.samples(all_drawn) == [(0, [6]), (1, [7]), (2, [5])]
    assert judging.samples(all_drawn)[2] is first.add.call_args_list[0].args[0][2]  # made once
    judging.begun_with([drawn(6), drawn(7), drawn(8)])
    assert (first.drop.call_count, reward.begun.add.call_count) == (1, 0)
    judging({2: drawn(8)})
    assert reward.begun.add.mock_calls == [mock.call({2: (2, [8])})]
    assert judging.seconds == 1.5
    judging.close()
    assert reward.begun.drop.call_count == 1


def test_a_sample_that_cannot_be_made_is_no_fault_of_the_engine():
    reward = Noted()
    judging = streaming([reward], lambda number, completion: completion.missing)
    judging({0: drawn(1)})
    judging({1: drawn(2)})
    reward.begun.add.assert_not_called()
    assert judging.begun_with([drawn(1), drawn(2)]) == {"own": reward.begun}


def test_an_early_reward_that_is_late_is_ended():
    class Endless(Own):
        time_limit = 0.5

        def __call__(self, samples):
            while True:
                pass

    with pytest.raises(ConfigError, match=r"'own'.*failed on the first 6 samples: not done within 0\.5 s"):
        scored([Endless()], range(6))
