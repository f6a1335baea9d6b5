import pytest

from lit_qrl.data.tasks.dataset import posed, read_turns, split_answer, text_of
from lit_qrl.errors import ConfigError

USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
SYSTEM, TOOL = {"role": "system", "content": "Think."}, {"role": "tool", "content": "2", "name": "add"}


def test_turns_of_every_role_and_those_of_sharegpt_are_read():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    turns = read_turns([SYSTEM, USER, call, TOOL], "Row 1")
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool"]
    assert turns[2] == {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}], "content": ""}
    # what a table fills with null is left out
    assert read_turns([{**USER, "tool_calls": None, "name": None}], "Row 1") == [USER]
    turns = [{"from": "system", "value": "Think."}, {"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
    assert read_turns(turns, "Row 1") == [SYSTEM, USER, ANSWER]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([USER, {"content": "x"}], r"Turn 2 of row 3 has an unknown role.*Given: None"),
        (["hello"], r"Turn 1 of row 3 is no message.*'hello'"),
        ([{"role": "user", "content": None}], r"Turn 1 of row 3 has no content"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"Turn 1 of row 3 holds more than text"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_row(turns, message):
    with pytest.raises(ConfigError, match=message):
        read_turns(turns, "Row 3")


def test_a_last_assistant_turn_is_the_answer():
    assert split_answer([USER, ANSWER]) == ([USER], "2")
    assert split_answer([USER, ANSWER, USER]) == ([USER, ANSWER, USER], None)
    assert text_of({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}) == "ab"


def test_system_prompt_and_suffix():
    assert posed([USER], "Think.", " Box it.") == [SYSTEM, {"role": "user", "content": "1 + 1? Box it."}]
    own = {"role": "system", "content": "Own."}
    assert posed([own, USER, ANSWER, USER, TOOL], "Think.", "!") == [
        own, USER, ANSWER, {"role": "user", "content": "1 + 1?!"}, TOOL,
    ]  # fmt: skip
    parts = [{"type": "text", "text": "1 + 1?"}]
    assert posed([{"role": "user", "content": parts}], "", "!")[0]["content"] == [*parts, {"type": "text", "text": "!"}]
    assert USER == {"role": "user", "content": "1 + 1?"}
