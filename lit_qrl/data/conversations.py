"""Chat turns in a row of data, as TRL and the hub have them: a list of messages with `role` and `content`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from lit_qrl.data.task import Message
from lit_qrl.errors import ConfigError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {"human": "user", "gpt": "assistant"}
"""What ShareGPT, whose turns are `from` and `value`, calls the roles."""
EXPECTED = "a list of messages such as {role: user, content: 1 + 1?}"
REMEDY = "Correct or remove the row, or leave it out by row_filter."


def is_conversation(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a cell holds turns rather than a text.

    >>> is_conversation([{"role": "user", "content": "1 + 1?"}]), is_conversation("1 + 1?")
    (True, False)
    """
    return isinstance(value, Sequence) and not isinstance(value, str)


def read_turns(value: Sequence[Any], where: str) -> list[Message]:
    """Return the turns of a cell as messages, without the keys that a table adds as null.

    Turns of ShareGPT (`from`, `value`) become `role` and `content`.

    Args:
        value: the cell.
        where: names row and column in errors.

    Raises:
        ConfigError: there is no turn, one is no message, its role is unknown or its content missing, or no user speaks.

    >>> read_turns([{"from": "human", "value": "1 + 1?"}], "Row 1")
    [{'role': 'user', 'content': '1 + 1?'}]
    """
    if not value:
        raise ConfigError(f"{where} is an empty list.", expected=EXPECTED, given="[]", remedy=REMEDY)
    turns = [_turn(turn, f"Turn {number} of {where[:1].lower()}{where[1:]}") for number, turn in enumerate(value, 1)]
    if not any(turn["role"] == "user" for turn in turns):
        raise ConfigError(
            f"{where} has no user turn.",
            expected="a turn of role user, which is what the policy answers",
            given=f"turns of {', '.join(turn['role'] for turn in turns)}",
            remedy=REMEDY,
        )
    return turns


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise ConfigError(f"{where} is no message.", expected=EXPECTED, given=repr(turn)[:80], remedy=REMEDY)
    found = {key: value for key, value in turn.items() if value is not None}
    if "role" not in found and "from" in found:
        speaker = found.pop("from")
        found = {"role": SPEAKERS.get(speaker, speaker), "content": found.pop("value", None), **found}
    role, content = found.get("role"), found.get("content")
    if role not in ROLES:
        raise ConfigError(
            f"{where} has an unknown role.",
            expected=", ".join(ROLES),
            given=repr(role),
            remedy=nearest(str(role), ROLES) or REMEDY,
        )
    parts = content if is_conversation(content) else []
    if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in parts or ()):
        raise ConfigError(
            f"{where} holds more than text.",
            expected="text, or parts of type text, since the policy reads nothing else",
            given=repr(content)[:80],
            remedy=REMEDY,
        )
    if not isinstance(content, str) and not parts and not found.get("tool_calls"):
        raise ConfigError(f"{where} has no content.", expected="text", given=repr(content)[:80], remedy=REMEDY)
    return found if "content" in found else {**found, "content": ""}


def split_answer(turns: Sequence[Message]) -> tuple[list[Message], str | None]:
    """Return the turns that are posed, and the text of a last assistant turn, which answers them.

    >>> split_answer([{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}])
    ([{'role': 'user', 'content': '1 + 1?'}], '2')
    """
    if turns[-1]["role"] != "assistant":
        return list(turns), None
    return list(turns[:-1]), text_of(turns[-1])


def text_of(message: Message) -> str:
    """Return the text of a message, of its parts together where it has several."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def posed(turns: Sequence[Message], system: str, suffix: str) -> list[Message]:
    """Return turns with a system message, where they have none, and a suffix to what the user said last.

    Args:
        turns: that end before the answer.
        system: text of the system message; empty adds none.
        suffix: put after the last user turn.

    >>> [turn["role"] for turn in posed([{"role": "user", "content": "1 + 1?"}], "Think.", "")]
    ['system', 'user']
    """
    found = [dict(turn) for turn in turns]
    if suffix:
        last = max(i for i, turn in enumerate(found) if turn["role"] == "user")
        content = found[last]["content"]
        found[last]["content"] = (
            content + suffix if isinstance(content, str) else [*content, {"type": "text", "text": suffix}]
        )
    if system and found[0]["role"] not in ("system", "developer"):
        found.insert(0, {"role": "system", "content": system})
    return found
