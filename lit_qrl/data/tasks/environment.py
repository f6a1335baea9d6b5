"""Environments of the library verifiers, single- and multi-turn and with tools, played by this run's sampler."""

import importlib
import json
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lit_qrl.data.environment import MultiTurnTask
from lit_qrl.data.task import Message, Row
from lit_qrl.errors import ConfigError
from lit_qrl.loop.turns import Say, TurnsOver
from lit_qrl.rewards.base import Reward

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Environment(MultiTurnTask):
    """An environment of verifiers (`vf.load_environment`); needs `pip install lit-qrl[environments]`.

    The environment believes that it talks to a server of the chat protocol; its requests go to the engine instead,
    whose token ids are kept over the turns. It must add to the conversation: one that rewrites earlier messages is
    refused. Calls of tools are read in the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen).

    Args:
        env: name of an installed environment.
        args: arguments of its `load_environment`.
        train_size: problems to train on; 0 takes all of its dataset.
        max_turns: answers of the policy in one sequence.
        time_limit: seconds that the environment may take at a time.
        max_message_tokens: tokens that the environment may say at a time.
        solved_at: score from which a conversation counts as solved.
        rewards: what is learned from; by default the environment's rubric.

    Raises:
        ConfigError: verifiers or the environment is not installed, or the environment has no data.
    """

    name = "environment"

    def __init__(
        self,
        env: str,
        args: dict[str, Any] | None = None,
        train_size: int = 0,
        max_turns: int = 8,
        time_limit: float = 60.0,
        max_message_tokens: int = 1024,
        solved_at: float = 1.0,
        rewards: list[Reward] | None = None,
    ) -> None:
        super().__init__(max_turns, time_limit, max_message_tokens, solved_at, rewards)
        self.env_name, self.args, self.train_size = env, args or {}, train_size
        self._env: Any = None

    @property
    def environment(self) -> Any:
        """The environment of verifiers."""
        if self._env is None:
            # verifiers takes the signals of the process, which end this run in order.
            handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
            try:
                self._env = importlib.import_module("verifiers").load_environment(self.env_name, **self.args)
            except ImportError as error:
                raise ConfigError(
                    "Environment needs the library verifiers.",
                    given=str(error),
                    remedy="pip install 'lit-qrl[environments]'.",
                ) from error
            except Exception as error:  # whatever an environment does when it is made
                raise ConfigError(
                    f"The environment {self.env_name!r} of verifiers cannot be loaded: {str(error).rstrip('.')}.",
                    given=self.args or None,
                    remedy="Install it (`vf-install NAME`), or correct data.task.args.",
                ) from error
            finally:
                if threading.current_thread() is threading.main_thread():
                    for name, handler in handlers.items():
                        signal.signal(name, handler)
        return self._env

    @property
    def tools(self) -> Sequence[Any] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Descriptions of the environment's tools, for the chat template."""
        return getattr(self.environment, "oai_tools", None) or None

    def setup(self) -> None:
        if not self.train_rows():
            raise ConfigError(f"The environment {self.env_name!r} has no data.", remedy="Check data.task.args.")

    def train_rows(self) -> Sequence[Row]:
        rows = self.environment.get_dataset()
        return list(rows)[: self.train_size or None]

    def evaluation_rows(self) -> Sequence[Row]:
        return list(self.environment.get_eval_dataset())

    def prompt(self, row: Row) -> str | list[Message]:
        return row["prompt"]

    async def play(self, row: Row, say: Say) -> float | None:
        client = _Client(say, row["prompt"])
        request = {"example_id": 0, "task": self.env_name, "answer": "", "info": {}, **row}
        with self._held:
            state = await self.environment.rollout(request, client, "policy", {})
        if client.failed is not None:
            raise client.failed
        error = state.get("error")
        if error is not None and not client.over:
            raise RuntimeError(f"{type(error).__name__}: {error.__cause__ or error}")
        await self.environment.rubric.score_rollout(state)
        return state["reward"]

    def start(self, row: Row) -> Any:
        raise NotImplementedError("verifiers plays the conversation itself")

    def reply(self, state: Any, answer: str) -> None:
        raise NotImplementedError("verifiers plays the conversation itself")

    def finish(self, state: Any) -> float | None:
        raise NotImplementedError("verifiers plays the conversation itself")


class _Client:
    """What verifiers takes for a client of the chat protocol: one conversation with the sampler."""

    def __init__(self, say: Say, prompt: Any) -> None:
        self.say, self.seen, self.answers = say, _contents(prompt), 0
        self.over = False
        self.failed: Exception | None = None
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))
        self.completions = SimpleNamespace(create=self._text)

    async def create(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> Any:
        """Return the sampler's answer to what the messages add to those before."""
        contents = _contents(messages)
        if contents[: len(self.seen)] != self.seen or (self.answers and len(contents) == len(self.seen)):
            self.failed = ValueError("it rewrites earlier messages of a conversation, whose tokens are drawn already")
            raise self.failed
        try:
            answer = await self.say(list(messages[len(self.seen) :]) if self.answers else [])
        except TurnsOver:
            self.over = True
            raise
        except ValueError as error:  # it said too much; verifiers would take any error for the model's
            self.failed = error
            raise
        self.seen, self.answers = [*contents, answer], self.answers + 1
        return _response(answer)

    async def _text(self, **_: Any) -> Any:
        self.failed = ValueError("it asks for plain completions; only chat environments can be played")
        raise self.failed


def _contents(messages: Any) -> list[str]:
    """Return the texts of messages; the calls of tools that were read out of an answer stand in it."""
    return [str(message.get("content") or "") for message in messages]


def _response(answer: str) -> Any:
    types = importlib.import_module("openai.types.chat")
    calls = []
    for index, call in enumerate(TOOL_CALL.findall(answer)):
        try:
            read = json.loads(call)
            function = {"name": str(read["name"]), "arguments": json.dumps(read.get("arguments", {}))}
        except (ValueError, KeyError, TypeError):
            continue
        calls.append({"id": f"call_{index}", "type": "function", "function": function})
    # The whole answer stays its content, since the conversation is compared by it.
    message = {"role": "assistant", "content": answer or " ", **({"tool_calls": calls} if calls else {})}
    return types.ChatCompletion.model_validate(
        {
            "id": "turn",
            "created": 0,
            "model": "policy",
            "object": "chat.completion",
            "choices": [{"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}],
        }
    )
