"""Tasks of several turns: the base class of an environment, and how its methods are kept from stopping a run."""

import asyncio
import inspect
import os
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from lit_qrl.data.task import Message, Row, Task
from lit_qrl.errors import ConfigError
from lit_qrl.loop.turns import Say, TurnsOver
from lit_qrl.rewards.base import Reward, Sample, check_names
from lit_qrl.rewards.simple import EpisodeReward


class MultiTurnTask(Task):
    """A task whose environment answers the policy's answers, such as tools, a game or a user.

    A subclass gives rows and prompts as any task, and three methods: `start`, `reply` and `finish`. They are plain
    functions, run in threads side by side, or `async` ones, which must not block. One that raises, does not come back
    within `time_limit`, or says more than `max_message_tokens` ends its own sequence, which is left out of the update;
    `environment/*` counts how sequences ended.

    Args:
        max_turns: answers of the policy in one sequence.
        time_limit: seconds that the environment may take at a time.
        max_message_tokens: tokens that the environment may say at a time.
        solved_at: score from which a sequence counts as solved in the evaluation.
        rewards: what is learned from; by default the environment's score alone.

    Raises:
        ConfigError: a limit is out of range.
    """

    def __init__(
        self,
        max_turns: int = 8,
        time_limit: float = 30.0,
        max_message_tokens: int = 1024,
        solved_at: float = 1.0,
        rewards: list[Reward] | None = None,
    ) -> None:
        limits = {"max_turns": max_turns, "time_limit": time_limit, "max_message_tokens": max_message_tokens}
        for name, value in limits.items():
            if value <= 0:
                raise ConfigError(f"{type(self).__name__}'s {name} is too small.", expected="above 0", given=value)
        self.max_turns, self.time_limit, self.max_message_tokens = max_turns, time_limit, max_message_tokens
        self.solved_at = solved_at
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

    async def play(self, row: Row, say: Say) -> float | None:
        """Return the score of one conversation; overridden where turns do not simply alternate."""
        state = await called(self.start, row)
        messages: Sequence[Message] = []
        try:
            while True:
                reply = await called(self.reply, state, await say(messages))
                if reply is None:
                    break
                messages = [{"role": "user", "content": reply}] if isinstance(reply, str) else reply
        except TurnsOver:
            pass
        return await called(self.finish, state)

    def reference(self, row: Row) -> Any:
        """Return None: the environment judges."""
        return None

    def is_correct(self, samples: Sequence[Sample]) -> list[bool]:
        return [
            sample.episode is not None and sample.episode.score is not None and sample.episode.score >= self.solved_at
            for sample in samples
        ]


class Threads:
    """Runs calls side by side, however many there are; a thread that has come back takes the next call.

    They are daemons: one that hangs keeps neither another call nor the end of the process waiting. Starting a thread
    for each call takes as long as many an answer.

    Args:
        patience: seconds after which a thread without a call ends.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self.patience = patience
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # there are no threads in it

    def _begin(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle, self._lock = 0, threading.Lock()

    def run(self, call: Callable[[], None]) -> None:
        """Run a call, which must not raise, and come back at once."""
        with self._lock:
            idle = self._idle > 0
            if idle:
                self._idle -= 1
                self._calls.put(call)
        if not idle:
            threading.Thread(target=self._work, args=(call,), name="environment", daemon=True).start()

    def _work(self, call: Callable[[], None]) -> None:
        while True:
            call()
            with self._lock:
                self._idle += 1
            try:
                call = self._calls.get(timeout=self.patience)
            except queue.Empty:
                with self._lock:
                    try:
                        call = self._calls.get_nowait()  # it came just now
                    except queue.Empty:
                        self._idle -= 1
                        return


_threads = Threads()


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns: awaited where it is `async`, else run in a thread, beside all other calls."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_to: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_to(value)

    def work() -> None:
        try:
            result, set_to = function(*arguments), future.set_result
        except BaseException as error:
            # A future cannot hold StopIteration, nor should an exit be anybody's but this sequence's.
            wrapped = isinstance(error, StopIteration) or not isinstance(error, Exception)
            result = RuntimeError(f"it raised {type(error).__name__}") if wrapped else error
            set_to = future.set_exception
        try:
            loop.call_soon_threadsafe(settle, set_to, result)
        except RuntimeError:
            return  # the rollout has ended without it

    _threads.run(work)
    return await future
