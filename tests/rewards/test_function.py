import asyncio
import os
import re
import threading

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rewards import FunctionReward, Sample, score_all
from lit_qrl.rewards.function import conversation, find_function

HERE = "tests.rewards.test_function"
SAMPLES = [Sample(f"{i}+1=", str(i + 1), str(i + 1), {"question": f"{i}+1=", "answer": i + 1}) for i in range(4)]


def right(completions, answer, **kwargs):
    return [float(given == str(wanted)) for given, wanted in zip(completions, answer, strict=True)]


async def right_async(prompts, completions, answer):
    await asyncio.sleep(0)
    return right(completions, answer)


def right_yielded(completions, answer, **kwargs):
    yield from right(completions, answer)


def everything(**kwargs):
    seen.append(kwargs)
    return [0.0] * len(kwargs["completions"])


seen = []
NO_FUNCTION = 5


@pytest.mark.parametrize("function", [right, right_async, right_yielded, f"{HERE}.right", f"{HERE}.right_async"])
@pytest.mark.parametrize("concurrency", [0, 3])
def test_functions_of_trl_s_signature(function, concurrency):
    reward = FunctionReward(function, weight=0.5, concurrency=concurrency)
    wrong = Sample("9+1=", "11", "10", {"question": "9+1=", "answer": 10})
    assert score_all([reward], [*SAMPLES, wrong]).total == [0.5] * 4 + [0.0]
    assert reward.name in ("right", "right_async", "right_yielded")


def test_a_function_gets_columns_as_lists_and_only_what_it_names():
    FunctionReward(everything, arguments={"scale": 2})(SAMPLES[:2])
    assert seen.pop() == {
        "prompts": ["0+1=", "1+1="],
        "completions": ["1", "2"],
        "references": ["1", "2"],
        "question": ["0+1=", "1+1="],
        "answer": [1, 2],
        "scale": 2,
    }
    assert (
        FunctionReward(lambda completions, scale=1: [scale] * len(completions), arguments={"scale": 3})(SAMPLES)
        == [3] * 4
    )


def test_rows_that_are_conversations_give_messages():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    samples = [Sample("rendered", "2", None, {"prompt": messages, "level": 3})]
    FunctionReward(everything)(samples)
    given = seen.pop()
    assert given["prompts"] == [messages]
    assert given["completions"] == [[{"role": "assistant", "content": "2"}]]
    assert given["level"] == [3]
    FunctionReward(everything, completions="text")(samples)
    assert seen.pop()["completions"] == ["2"]
    FunctionReward(everything, completions="messages")(SAMPLES[:1])
    given = seen.pop()
    assert given["prompts"] == [[{"role": "user", "content": "0+1="}]]
    assert given["completions"] == [[{"role": "assistant", "content": "1"}]]
    assert conversation({"tags": ["a"], "chat": messages}) == messages
    assert conversation({"tags": [], "question": "1+1"}) is None


def test_a_reward_that_scores_nothing_at_all_is_told(caplog):
    def silent(completions):
        return [None] * len(completions)

    samples = [Sample("", "a"), Sample("", "b")]
    with caplog.at_level("WARNING"):
        assert score_all([FunctionReward(silent), FunctionReward(lambda completions: [1.0, 2.0])], samples).total
        assert not caplog.text  # another one scores
        assert score_all([FunctionReward(silent)], samples).total == [None, None]
    assert "None of 2 completions has a score (reward 'silent')" in caplog.text


def test_a_service_that_fails_on_a_sample_costs_that_one_after_retries(monkeypatch):
    monkeypatch.setattr("lit_qrl.rewards.service.FIRST_PAUSE", 0.0)
    tries = []

    def judge(completions, question):
        tries.append(completions[0])
        if completions[0] == "2" or (completions[0] == "3" and tries.count("3") < 3):
            raise ConnectionError("busy")
        return 1.0

    shown = []
    reward = FunctionReward(judge, name="judge", concurrency=2, retries=2)
    scores = score_all([reward], SAMPLES, error_reward=None, progress=lambda name: lambda *done: shown.append(done))
    assert scores.total == scores.parts["judge"] == [1.0, None, 1.0, 1.0]
    assert scores.errors == 1
    assert reward.failures == {1: "ConnectionError: busy"}
    assert (tries.count("2"), tries.count("3")) == (3, 3)
    assert shown[-1] == (4, 4)
    assert shown == sorted(set(shown))


def test_a_coroutine_that_hangs_is_cancelled():
    cancelled = threading.Event()

    async def judge(completions):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(ConfigError, match=r"'judge'.*not done within 0.2 s"):
        score_all([FunctionReward(judge, time_limit=0.2)], SAMPLES)
    assert cancelled.wait(30)


def test_a_service_that_is_away_for_all_is_a_failed_call():
    def judge(completions):
        raise ConnectionError("refused")

    with pytest.raises(ConfigError, match=r"'judge' .*every call failed, the first with ConnectionError: refused"):
        score_all([FunctionReward(judge, concurrency=2, retries=0)], SAMPLES)


@pytest.mark.parametrize(
    "path, words",
    [
        ("score", "has no module"),
        ("nosuch.score", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}.rihgt", "Did you mean 'right'?"),
        (f"{HERE}.NO_FUNCTION", "is no function"),
        (f"{HERE}.Sample", "is no function"),
    ],
)
def test_a_function_that_is_not_there(path, words):
    with pytest.raises(ConfigError) as caught:
        find_function(path)
    assert words in str(caught.value)


def test_limits_of_single_calls_without_such_calls_are_refused():
    for unheeded in ({"timeout": 5.0}, {"retries": 0}):
        with pytest.raises(ConfigError, match=r"for calls of single samples.*concurrency 0\. Set concurrency"):
            FunctionReward(right, **unheeded)
        assert FunctionReward(right, concurrency=1, **unheeded)(SAMPLES) == [1.0] * 4
    with pytest.raises(ConfigError, match=r"not a finite number.*Given: \[1\.0, 2\.0\] for sample 0"):
        score_all([FunctionReward(lambda completions: [1.0, 2.0], concurrency=1)], SAMPLES)


def hold(completions, **kwargs):
    if completions[0] == "2":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if completions[0] == "3":
        while True:
            pass
    return [1.0] * len(completions)


def test_calls_that_hold_the_interpreter_end_alone():
    reward = FunctionReward(f"{HERE}.hold", concurrency=4, timeout=2.0, retries=0)
    whole = FunctionReward(hold, processes=True, time_limit=2.0)
    try:
        assert score_all([reward], SAMPLES, error_reward=-1.0).total == [1.0, -1.0, -1.0, 1.0]
        assert reward.failures == dict.fromkeys((1, 2), "not done within 2 s")
        assert whole(SAMPLES[:1]) == [1.0]
        with pytest.raises(TimeoutError, match="not done within 2 s"):
            whole([*SAMPLES[1:2], *SAMPLES])
    finally:
        reward.close()
        whole.close()


def test_what_no_other_process_can_import_stays_in_this_one():
    def within(completions, **kwargs):
        return [float(os.getpid())]

    assert FunctionReward(within, concurrency=1)(SAMPLES[:1]) == [os.getpid()]
    assert FunctionReward(right, concurrency=1, processes=False)(SAMPLES) == [1.0] * 4
    with pytest.raises(ConfigError, match=r"'within'.*process of its own.*set `processes: false`"):
        FunctionReward(within, processes=True)
    broken = FunctionReward(right, concurrency=1)
    broken.pool.function = Unimportable()
    with pytest.raises(ConfigError, match=r"Unimportable does not start.*ValueError"):
        broken(SAMPLES)


class Unimportable:
    def __reduce__(self):
        return int, ("no number",)
