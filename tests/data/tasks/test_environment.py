import signal
import sys

import pytest

from lit_qrl.data.tasks.environment import Environment, _response
from lit_qrl.errors import ConfigError
from lit_qrl.loop.turns import Conversations
from lit_qrl.types import Completion

SOURCE = '''
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return str(a + b)


def load_environment(rows=3, rewrites=False):
    data = Dataset.from_list([{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(rows)])

    def right(completion, answer, **_):
        return float(answer in completion[-1]["content"])

    class Adds(vf.ToolEnv):
        async def get_prompt_messages(self, state):
            messages = await super().get_prompt_messages(state)
            return messages[-1:] if rewrites else messages

    return Adds(tools=[add], dataset=data, eval_dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=5)
'''
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"needs the library verifiers.*pip install 'lit-qrl\[environments\]'"):
        Environment("adds").setup()


@pytest.mark.environments
def test_calls_of_tools_are_read_out_of_an_answer():
    choice = _response(f"Let me see. {CALL} <tool_call>{{bad}}</tool_call>").choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 2}')
    assert _response("4").choices[0].message.tool_calls is None


@pytest.fixture
def adds(tmp_path, monkeypatch):
    (tmp_path / "adds.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.delitem(sys.modules, "adds", raising=False)
    return "adds"


def play(task, answers, rows, **limits):
    """Answer the turns of each row by its list; return the completions and what the environment said."""
    heard, texts = [], {}

    def encode(messages):
        heard.append([message["content"] for message in messages])
        return [7, 7]

    with Conversations(task, rows, [[5]] * len(rows), encode, lambda ids: texts[tuple(ids)], 50, 0) as talks:
        while talks.open:
            for turn in talks.waiting("all"):
                ids = (turn.index, len(turn.tokens))
                texts[ids] = answers[turn.index].pop(0)
                talks.answered(
                    turn, Completion(token_ids=list(ids), logprobs=[0.0, 0.0], finish_reason="stop", version=0)
                )
    return talks.completions(), heard


@pytest.mark.environments
def test_a_tool_answers_and_the_rubric_scores(adds):
    task = Environment(adds)
    task.setup()
    rows = task.train_rows()
    assert task.prompt(rows[2]) == [{"role": "user", "content": "2+2="}]
    assert task.tools[0]["function"]["name"] == "add"
    completions, heard = play(task, {0: [CALL, "it is 4"], 1: ["5"]}, [rows[2], rows[1]])
    assert heard == [["4"]]
    assert [one.episode.score for one in completions] == [1.0, 0.0]
    assert [one.episode.turns for one in completions] == [2, 1]
    assert completions[0].drawn == [True, True, False, False, True, True]


@pytest.mark.environments
def test_limits_and_rewritten_histories_end_a_conversation_by_name(adds):
    tasks = Environment(adds, max_turns=1), Environment(adds, args={"rewrites": True})
    before = signal.getsignal(signal.SIGTERM)
    for task in tasks:
        task.setup()
    assert signal.getsignal(signal.SIGTERM) is before  # verifiers takes the signals, which are the run's
    rows = tasks[0].train_rows()
    (limited,), _ = play(tasks[0], {0: [CALL]}, rows[:1])
    assert (limited.episode.score, limited.episode.ended) == (0.0, "turns")
    (rewritten,), _ = play(tasks[1], {0: [CALL, "4"]}, rows[:1])
    assert rewritten.episode.ended == "error"
    assert "rewrites earlier messages" in rewritten.episode.error


@pytest.mark.environments
def test_an_unknown_environment_is_named(adds):
    with pytest.raises(ConfigError, match="'no_such_env' of verifiers cannot be loaded"):
        Environment("no_such_env").setup()
