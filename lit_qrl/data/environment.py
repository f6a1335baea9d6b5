"""Tasks of several turns: the base class of an environment, and how its methods are kept from stopping a run."""

import base64
import inspect
import logging
import pickle
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from lit_qrl.data.task import Message, Row, Task
from lit_qrl.errors import ConfigError
from lit_qrl.loop.turns import Say, TurnsOver
from lit_qrl.rewards.base import Reward, Sample, check_names
from lit_qrl.rewards.limit import GRACE
from lit_qrl.rewards.service import HoldingEnds, called
from lit_qrl.rewards.simple import EpisodeReward
from lit_qrl.rewards.workers import Failure, WorkerPool, WorkerStartError, sent

log = logging.getLogger(__name__)

METHODS = ("start", "reply", "finish")


class MultiTurnTask(Task):
    """A task whose environment answers the policy's answers, such as tools, a game or a user.

    A subclass gives rows and prompts as any task, and three methods: `start`, `reply` and `finish`. They are plain
    functions, run side by side in processes of their own, or `async` ones of this process, which must not block. One
    that raises, does not come back within `time_limit`, or says more than `max_message_tokens` ends its own sequence,
    which is left out of the update; `environment/*` counts how sequences ended.

    Args:
        max_turns: answers of the policy in one sequence.
        time_limit: seconds that the environment may take at a time.
        max_message_tokens: tokens that the environment may say at a time.
        solved_at: score from which a sequence counts as solved in the evaluation.
        rewards: what is learned from; by default the environment's score alone.
        processes: run plain methods in processes of their own, which `time_limit` can end whatever they do. A state
            goes from one to the next as pickle has it, and what a method writes to the task itself stays there. False
            runs them in threads of this process; by default so do tasks and states that pickle cannot take.

    Raises:
        ConfigError: a limit is out of range.
    """

    _pool: WorkerPool | None = None
    processes: bool | None = None

    def __init__(
        self,
        max_turns: int = 8,
        time_limit: float = 30.0,
        max_message_tokens: int = 1024,
        solved_at: float = 1.0,
        rewards: list[Reward] | None = None,
        processes: bool | None = None,
    ) -> None:
        limits = {"max_turns": max_turns, "time_limit": time_limit, "max_message_tokens": max_message_tokens}
        for name, value in limits.items():
            if value <= 0:
                raise ConfigError(f"{type(self).__name__}'s {name} is too small.", expected="above 0", given=value)
        self.max_turns, self.time_limit, self.max_message_tokens = max_turns, time_limit, max_message_tokens
        self.solved_at = solved_at
        self.processes = processes if processes is not None else self.processes
        self._held = HoldingEnds(max(time_limit, GRACE))
        self.rewards = [EpisodeReward()] if rewards is None else list(rewards)
        check_names(self.rewards)

    @abstractmethod
    def start(self, row: Row) -> Any:
        """Return the state of a new conversation about a row; `reply` may change it."""

    @abstractmethod
    def reply(self, state: Any, answer: str) -> Sequence[Message] | str | None:
        """Return what the environment says to the policy's answer: messages, or a user's text; None ends it."""

    @abstractmethod
    def finish(self, state: Any) -> float | None:
        """Return the score of a conversation that has ended, at a limit or by `reply`; None leaves it out."""

    def prepare(self) -> None:
        """Have other processes import the task, if they are to play; no conversation's time counts that.

        Raises:
            ConfigError: `processes` is true, and they cannot.
        """
        if self.processes is False or type(self).play is not MultiTurnTask.play:
            return
        try:
            if self._pool is None:
                if any(inspect.iscoroutinefunction(getattr(self, name)) for name in METHODS):
                    raise WorkerStartError("a method of it is `async`")
                if sent(self) is None:
                    raise WorkerStartError("pickle cannot take it")
                self._pool = WorkerPool(_Methods(self), timeout=self.time_limit + 1.0)
            self._pool.start()
        except WorkerStartError as error:
            self._stay(str(error))

    def _stay(self, why: str) -> None:
        """Run the methods in this process from now on."""
        if self.processes:
            raise ConfigError(
                f"{type(self).__name__} cannot run in processes of its own: {why}.",
                expected="a task in a module, and states, that pickle can take",
                remedy="Set processes to false.",
            )
        log.info("%s runs in threads of this process, since %s.", type(self).__name__, why)
        self.processes = False

    async def play(self, row: Row, say: Say) -> float | None:
        """Return the score of one conversation; overridden where turns do not simply alternate."""
        pool = None if self.processes is False else self._pool
        state: Any = None
        if pool is not None:
            state, _ = _returned(await called(pool.call, "start", row))
            if state is None and self.processes is not False:
                self._stay("its states are such as pickle cannot take")
        if state is None:
            with self._held:
                pool, state = None, await called(self.start, row)

        async def done(name: str, *arguments: Any) -> Any:
            nonlocal state
            if pool is None:
                with self._held:
                    return await called(getattr(self, name), state, *arguments)
            state, result = _returned(await called(pool.call, name, state, *arguments))
            return result

        messages: Sequence[Message] = []
        try:
            while True:
                reply = await done("reply", await say(messages))
                if reply is None:
                    break
                messages = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
        except TurnsOver:
            pass
        return await done("finish")

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def reference(self, row: Row) -> Any:
        """Return None: the environment judges."""
        return None

    def is_correct(self, samples: Sequence[Sample]) -> list[bool]:
        return [
            sample.episode is not None and sample.episode.score is not None and sample.episode.score >= self.solved_at
            for sample in samples
        ]


class _Methods:
    """A task's methods as a worker calls them; a state comes and goes as letters, which nobody else reads."""

    def __init__(self, task: MultiTurnTask) -> None:
        self.task = task

    def __call__(self, name: str, given: Any, *arguments: Any) -> tuple[str | None, Any]:
        """Return the state after a method and what it returned; no state where pickle cannot take it."""
        if name == "start":
            state, result = self.task.start(given), None
        else:
            state = pickle.loads(base64.b64decode(given))
            result = getattr(self.task, name)(state, *arguments)
        try:
            return base64.b64encode(pickle.dumps(state)).decode(), result
        except Exception:
            if name == "start":
                return None, None
            raise


def _returned(result: Any) -> Any:
    if isinstance(result, Failure):
        raise result()
    return result
