"""Problems from a file or any data set, posed and scored as its YAML says."""

import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from lit_qrl.data.problems import warn_of_fewer
from lit_qrl.data.sources import MemoryRows, check_columns, read_rows
from lit_qrl.data.task import ListedTask, Message, Row, normalized
from lit_qrl.errors import ConfigError, nearest
from lit_qrl.rewards.base import Reward, Sample, check_names, check_row
from lit_qrl.rewards.function import as_rewards
from lit_qrl.rewards.math import MathReward
from lit_qrl.rewards.simple import ConstantReward, FormatReward

log = logging.getLogger(__name__)

ANSWER = "answer"
HELD_OUT_SHARE = 0.1
HELD_OUT_MOST = 500
"""Held out by default: a tenth of the rows, at most 500, with which an accuracy has a standard error of about 2 %."""


class DatasetTask(ListedTask):
    r"""Rows with a question: JSONL, JSON, CSV, TSV or Parquet files, folders, hub data sets, or rows held in Python.

    No prompt is both trained on and evaluated: training rows whose prompt is also evaluated are removed and counted.
    A question may be a list of chat turns (`role`, `content`); a last assistant turn is then no part of the prompt.

    Args:
        path: a file, a folder, or a name on the hub; in Python also a `datasets.Dataset`, a list of dictionaries or
            another iterable of them, or a `DatasetDict`, of which `config.yaml` has the number and a digest.
        prompt_column: column of the question.
        answer_column: column of the gold answer; the same as `prompt_column` takes the last assistant turn. Where no
            reward asks for an answer, the rows need no such column.
        split: of a folder or hub data set, to train on; null for a set that is only evaluated on, whole, as a
            benchmark is.
        subset: configuration of a hub data set; of a list, the rows of all. It is not `evaluation_path`'s.
        evaluation_path: where the held-out rows are, likewise; by default in `path`.
        evaluation_split: split to evaluate on. With neither this nor `evaluation_path`, rows are held out of the
            training data by a seeded draw.
        evaluation_size: rows to hold out, or to take of an evaluation source; by default all of that, or a tenth of the
            training data.
        answer_pattern: regular expression with one group that finds the answer in its column: `#### (.*)` for GSM8K;
            by default the whole column.
        row_filter: allowed values by column, such as `level: [3, 4, 5]`; other rows are left out.
        system_prompt: the system message, if any, of rows without one of their own.
        prompt_suffix: put after every question; after the last user turn of a conversation.
        chat: pose chat messages; else plain text.
        rewards: what is learned from; by default `MathReward`. A plain function may stand for a reward.
        correct: decides what counts as solved (a score of 1); by default the first of `rewards` that looks at the
            answer, else a `MathReward`.
        seed: of the draw of held-out rows.
        name: of the task.

    Raises:
        ConfigError: an argument is wrong; in `setup`, a file or a column is missing, a row has no prompt or answer or
            one that no completion can meet, or no row is left.
    """

    in_memory = ("path", "evaluation_path")

    # Texts are `str` with an empty default: of a `str | None`, the parser reads the value as YAML first, to which
    # "#### (.*)" is a comment.
    def __init__(
        self,
        path: str | Iterable[Mapping[str, Any]],
        prompt_column: str = "question",
        answer_column: str = ANSWER,
        split: str | None = "train",
        subset: str | list[str] | None = None,
        evaluation_path: str | Iterable[Mapping[str, Any]] | None = None,
        evaluation_split: str | None = None,
        evaluation_size: int | None = None,
        answer_pattern: str = "",
        row_filter: dict[str, list[Any]] | None = None,
        system_prompt: str = "",
        prompt_suffix: str = "",
        chat: bool = True,
        rewards: list[Reward] | None = None,
        correct: Reward | None = None,
        seed: int = 0,
        name: str = "dataset",
    ) -> None:
        super().__init__()
        if evaluation_size is not None and evaluation_size < 1:
            raise ConfigError("evaluation_size is too small.", expected="1 or more, or null", given=evaluation_size)
        self.path: str | MemoryRows = path if isinstance(path, str) else MemoryRows(path)
        self.split, self.subset, self.name = split, subset, name
        if subset == []:
            raise ConfigError("subset is an empty list.", expected="names, one name, or null", given=subset)
        self.prompt_column, self.answer_column = prompt_column, answer_column
        self.evaluation_path: str | MemoryRows | None = (
            evaluation_path
            if evaluation_path is None or isinstance(evaluation_path, str)
            else MemoryRows(evaluation_path)
        )
        self.evaluation_split = evaluation_split
        self.evaluation_size, self.seed = evaluation_size, seed
        self.answer_pattern = _compiled(answer_pattern) if answer_pattern else None
        self.row_filter = dict(row_filter or {})
        self.system_prompt, self.prompt_suffix, self.chat = system_prompt, prompt_suffix, chat
        self.rewards = [MathReward()] if rewards is None else as_rewards(rewards)
        check_names(self.rewards)
        judges = [reward for reward in self.rewards if not isinstance(reward, (FormatReward, ConstantReward))]
        self._judged_by_default = correct is None and not judges
        self.correct: Reward = as_rewards([correct or (judges[0] if judges else MathReward())])[0]
        self.judge = self.correct

    def setup(self) -> None:
        if self._evaluation:
            return
        if self.split is None:
            self._evaluation = self._evaluated()
            return
        train = self._read(self.path, self.split)
        if self.evaluation_path is None and self.evaluation_split is None:
            evaluation = self._held_out(train)
        else:
            evaluation = self._evaluated()
        evaluated = {self.key(row) for row in evaluation}
        kept = [row for row in train if self.key(row) not in evaluated]
        removed = len(train) - len(kept)
        if not kept:
            raise ConfigError(
                f"No training row of {_shown(self.path)} is left.",
                expected="training rows that are not evaluated on",
                given=f"{len(train)} rows, all of them among the {len(evaluation)} evaluation rows",
                remedy="Name another evaluation source, or lower evaluation_size.",
            )
        if removed and (self.evaluation_path is not None or self.evaluation_split is not None):
            log.info("Removed %d of %d training rows that are also evaluated on.", removed, len(train))
        self._train, self._evaluation = kept, evaluation

    def prompt(self, row: Row) -> str | list[Message]:
        turns = [{"role": "user", "content": str(row[self.prompt_column])}]
        if is_conversation(row[self.prompt_column]):
            turns = self._turns(row)[0]
        elif not self.chat:
            system = f"{self.system_prompt}\n\n" if self.system_prompt else ""
            return f"{system}{row[self.prompt_column]}{self.prompt_suffix}"
        return posed(turns, self.system_prompt, self.prompt_suffix)

    def reference(self, row: Row) -> Any:
        answer = self._answer(row)
        if self.answer_pattern is None:
            return answer
        matches = self.answer_pattern.findall(str(answer))
        return matches[-1].strip() if matches else None

    def key(self, row: Row) -> str:
        """Return the question, without space and case."""
        prompt = row[self.prompt_column]
        return normalized(self._turns(row)[0] if is_conversation(prompt) else str(prompt))

    def close(self) -> None:
        super().close()
        self.correct.close()

    # ----------------------------------------------------------------------------------------------------------- rows

    def _read(self, path: str | MemoryRows, split: str) -> list[dict[str, Any]]:
        if isinstance(path, str):
            given = self.subset if path == self.path else None
            subsets = given if isinstance(given, list) else [given]
            rows = [row for subset in subsets for row in read_rows(path, split, subset)]
        elif not (rows := path.read(split)):
            raise ConfigError("The data set is empty.", expected="at least one row", given="0 rows")
        columns = [self.prompt_column, *self.row_filter]
        answered = self._has_answers(rows[0])
        check_columns(rows, [*columns, self.answer_column] if answered else columns, str(path))
        for column, allowed in self.row_filter.items():
            kept = [row for row in rows if _is_allowed(row.get(column), allowed)]
            if not kept:
                present = sorted({str(row.get(column)) for row in rows})
                raise ConfigError(
                    f"row_filter leaves no row of {_shown(path)}.",
                    expected=f"values that column {column!r} has: {', '.join(present[:10])}",
                    given=allowed,
                    remedy="Correct row_filter.",
                )
            rows = kept
        where = f"of {_shown(path)}" + (" after row_filter" if self.row_filter else "")
        for number, row in enumerate(rows, start=1):
            self._check(row, f"Row {number} {where}", answered)
        return rows

    def _evaluated(self) -> list[dict[str, Any]]:
        """Return the rows of the evaluation source."""
        rows = self._read(self.evaluation_path or self.path, self.evaluation_split or "test")[: self.evaluation_size]
        warn_of_fewer("data.task.evaluation_size", self.evaluation_size, len(rows))
        return rows

    def _has_answers(self, row: dict[str, Any]) -> bool:
        """Return whether rows have a column of answers; one that nobody named may be missing if no reward asks."""
        if self.answer_column in row or self.answer_column != ANSWER or self.answer_pattern is not None:
            return True
        if self._judged_by_default:
            self.correct = self.judge = self.rewards[0]
        for reward in dict.fromkeys((*self.rewards, self.correct)):
            if reward.unscorable(Sample("", "", None, row)) is not None:
                raise ConfigError(
                    f"The rows have no column {ANSWER!r}, and {reward.described} asks for a gold answer.",
                    expected=f"the column of the answers among {', '.join(map(str, row))}",
                    remedy="Set answer_column to it, or take rewards that ask for no answer.",
                )
        return False

    def _check(self, row: dict[str, Any], where: str, answered: bool) -> None:
        prompt = row.get(self.prompt_column)
        if is_conversation(prompt):
            self._check_turns(prompt, f"{where}, column {self.prompt_column!r},")
        elif not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(
                f"{where} has no prompt in column {self.prompt_column!r}.",
                expected="text, or a list of chat turns",
                given=repr(prompt)[:80],
                remedy="Correct or remove the row, or name another prompt_column.",
            )
        answer = self._answer(row)
        if answered and (answer is None or (isinstance(answer, str) and not answer.strip())):
            turn = prompt[-1] if is_conversation(prompt) and self.answer_column == self.prompt_column else None
            raise ConfigError(
                f"{where} has no answer in column {self.answer_column!r}.",
                expected="a last turn of role assistant, which is the gold answer" if turn else "a gold answer",
                given=f"a last turn of role {turn.get('role')}" if turn else repr(answer),
                remedy="Name another answer_column, or leave the row out by row_filter."
                if turn
                else "Correct or remove the row, or name another answer_column.",
            )
        if not self.reference(row) and self.answer_pattern is not None:
            raise ConfigError(
                f"{where} has no answer that answer_pattern finds.",
                expected=self.answer_pattern.pattern,
                given=f"…{str(answer)[-80:]}",
                remedy="Correct answer_pattern, or set it to null: an earlier configuration file may give it.",
            )
        check_row(list(dict.fromkeys((*self.rewards, self.correct))), Sample("", "", self.reference(row), row), where)

    def _check_turns(self, turns: Sequence[Any], where: str) -> None:
        roles = [turn["role"] for turn in split_answer(read_turns(turns, where))[0]]
        if "user" not in roles or roles[-1] not in ("user", "tool"):
            raise ConfigError(
                f"{where} ends with nothing to answer.",
                expected="a turn of role user, and one of user or tool at the end or before the assistant's last",
                given=f"turns of {', '.join(roles) or 'an assistant alone'}",
                remedy=REMEDY,
            )
        if not self.chat:
            raise ConfigError(
                f"{where} is a conversation, but chat: false poses plain text.",
                expected="chat: true, or a column of text",
                given="chat: false",
                remedy="Leave chat out, or name another prompt_column.",
            )

    def _turns(self, row: Row) -> tuple[list[Message], str | None]:
        """Return what a row poses, and the turn that answers it."""
        return split_answer(read_turns(row[self.prompt_column], "A row"))

    def _answer(self, row: Row) -> Any:
        if self.answer_column == self.prompt_column and is_conversation(row[self.prompt_column]):
            return self._turns(row)[1]
        return row.get(self.answer_column)

    def _held_out(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        wanted = self.evaluation_size
        if wanted is None:
            wanted = max(1, min(HELD_OUT_MOST, int(len(rows) * HELD_OUT_SHARE)))
        if wanted >= len(rows):
            raise ConfigError(
                f"Holding out {wanted} rows of {_shown(self.path)} leaves none to train on.",
                expected=f"an evaluation_size below its {len(rows)} rows",
                given=wanted,
                remedy="Lower evaluation_size, or name an evaluation_path.",
            )
        chosen = random.Random(self.seed).sample(range(len(rows)), wanted)
        return [rows[i] for i in sorted(chosen)]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError("answer_pattern is not a regular expression.", given=f"{pattern!r}: {error}") from error
    if compiled.groups != 1:
        raise ConfigError(
            "answer_pattern has not one group.",
            expected="exactly one pair of brackets around the answer, such as '#### (.*)'",
            given=pattern,
        )
    return compiled


def _shown(source: str | MemoryRows) -> str:
    return repr(source) if isinstance(source, str) else str(source)


def _is_allowed(value: Any, allowed: Sequence[Any]) -> bool:
    """Return whether a value is allowed; numbers and their text are the same, since CSV has only text."""
    return value in allowed or str(value) in map(str, allowed)


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
        ConfigError: there is no turn, one is no message, its role is unknown, or its content missing.

    >>> read_turns([{"from": "human", "value": "1 + 1?"}], "Row 1")
    [{'role': 'user', 'content': '1 + 1?'}]
    """
    if not value:
        raise ConfigError(f"{where} is an empty list.", expected=EXPECTED, given="[]", remedy=REMEDY)
    return [_turn(turn, f"Turn {number} of {where[:1].lower()}{where[1:]}") for number, turn in enumerate(value, 1)]


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
