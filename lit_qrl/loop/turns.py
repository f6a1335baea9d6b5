"""Rollouts of several turns: the sampler answers, the environment answers back, in one sequence of token ids.

A sequence is the prompt, then in turn what the sampler drew (it is trained on) and what the environment said (context,
masked out of loss, corrections and metrics). The ids that were drawn stay as they are: nothing is ever tokenized again.
Every sequence goes on as soon as its environment has answered, whatever the others do.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from lit_qrl.errors import StoppedError
from lit_qrl.rollout.engine import Progress, Turn, Wait
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion, Episode, EpisodeEnd

Messages = Sequence[Mapping[str, Any]]
Say = Callable[[Messages], Coroutine[Any, Any, str]]
"""Adds an environment's messages to the sequence and returns the text of the sampler's answer."""

PATIENCE = 1.0
"""Seconds after which `Conversations.waiting` comes back without a turn, so that an engine can look at its clock."""
TOGETHER = 0.25
"""Seconds without a new turn after which a batch is drawn without the sequences whose environment is still busy."""


class TurnsOver(Exception):  # noqa: N818  (an ending, not an error)
    """Raised by `Say` where the sequence may not go on; `ended` says at which limit."""

    def __init__(self, ended: EpisodeEnd) -> None:
        super().__init__(f"The sequence has reached its limit of {ended}.")
        self.ended: EpisodeEnd = ended


@runtime_checkable
class TakesTurns(Protocol):
    """A task whose completions are conversations."""

    max_turns: int
    """Answers of the sampler in one sequence."""
    time_limit: float
    """Seconds that the environment may take for one answer, its score at the end included."""
    max_message_tokens: int
    """Tokens that the environment may say at a time."""

    def prompt(self, row: Mapping[str, Any]) -> Any:
        """Return the prompt: a text, or messages."""
        ...

    def prepare(self) -> None:
        """Do what takes long before the first sequence is played, whose time it must not take."""
        ...

    async def play(self, row: Mapping[str, Any], say: Say) -> float | None:
        """Return the score of one sequence; `say([])` answers the prompt itself."""
        ...


@dataclass(slots=True)
class _Sequence:
    """One conversation under way; `whole` is everything after its prompt."""

    prompt: list[int]
    whole: Completion
    turns: int = 0
    limit: EpisodeEnd = "done"
    answer: "asyncio.Future[Completion] | None" = None
    busy_since: float = 0.0


class Conversations:
    """The conversations of one rollout, as the engine sees them: a `Dialogue`.

    The environments run in an event loop of a thread of their own, so that a slow one costs its own sequence only. One
    that raises, hangs beyond `time_limit` or says too much ends its sequence, which then has no score.

    Args:
        task: how a sequence is played, and its limits.
        rows: one for each sequence.
        prompts: token ids, one for each sequence.
        encode: token ids of messages that follow an answer.
        decode: text of token ids.
        max_tokens: of a sequence after its prompt, the environment's included.
        seed: each turn's is derived from it, the sequence and the number of the turn.
        progress: called with (sequences finished, tokens drawn).
        numbers: of the sequences, in the seeds of their turns; by default their positions.
    """

    def __init__(
        self,
        task: TakesTurns,
        rows: Sequence[Mapping[str, Any]],
        prompts: Sequence[Sequence[int]],
        encode: Callable[[Messages], list[int]],
        decode: Callable[[Sequence[int]], str],
        max_tokens: int,
        seed: int,
        progress: Progress | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.numbers = range(len(rows)) if numbers is None else numbers
        self.task, self.rows, self.encode, self.decode = task, rows, encode, decode
        self.max_tokens, self.seed, self.progress = max_tokens, seed, progress
        self._sequences = [
            _Sequence(list(prompt), Completion(token_ids=[], logprobs=[], finish_reason="stop", version=-1, drawn=[]))
            for prompt in prompts
        ]
        self._turns: list[Turn] = []
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._beats, self._heard, self._silent = 0, -1, 0.0
        self._finished = self._drawn = 0

    # ------------------------------------------------------------------------------------------------- environments

    def __enter__(self) -> "Conversations":
        self.task.prepare()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._heartbeat()
        for index in range(len(self._sequences)):
            self._loop.create_task(self._guarded(index))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _heartbeat(self) -> None:
        self._beats += 1
        self._loop.call_later(PATIENCE, self._heartbeat)

    async def _guarded(self, index: int) -> None:
        """Play one sequence to its end, whatever the environment does."""
        one = self._sequences[index]
        one.busy_since = time.monotonic()
        play = asyncio.ensure_future(self._played(index))
        score, ended, error = None, "done", ""
        while not play.done():
            left = self.task.time_limit - (time.monotonic() - one.busy_since)
            if one.answer is None and left <= 0:
                play.cancel()
                ended, error = "time", f"no answer within {self.task.time_limit:g} s"
                break
            await asyncio.wait({play}, timeout=PATIENCE if one.answer else min(left + 1e-3, PATIENCE))
        else:
            failure = None if play.cancelled() else play.exception()
            if isinstance(failure, TurnsOver):
                ended = failure.ended
            elif failure is not None or play.cancelled():
                ended, error = (
                    "error",
                    "it cancelled itself" if failure is None else f"{type(failure).__name__}: {failure}",
                )
            elif one.turns == 0:
                ended, error = "error", "it asked for no answer"
            else:
                score, ended = play.result(), one.limit
        with self._changed:
            one.whole.episode = Episode(score=score, ended=ended, turns=one.turns, error=error[:500])
            self._turns = [turn for turn in self._turns if turn.index != index]
            self._finished += 1
            self._changed.notify()
        if self.progress is not None:
            self.progress(self._finished, self._drawn)

    async def _played(self, index: int) -> float | None:
        try:
            score: Any = await self.task.play(self.rows[index], lambda messages: self._say(index, messages))
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop of all
            raise RuntimeError(f"it raised {type(error).__name__}") from error
        if score is not None and not math.isfinite(score := float(score)):
            raise ValueError(f"its score is {score}, which is not a finite number")
        return score

    async def _say(self, index: int, messages: Messages) -> str:
        """Return the answer to messages of the environment; `TurnsOver` where a limit is reached."""
        one, whole = self._sequences[index], self._sequences[index].whole
        drawn = cast(list[bool], whole.drawn)
        await asyncio.sleep(0)  # an environment that asks again and again, past its limits, holds up no other
        if one.turns >= self.task.max_turns:
            self._end(one, "turns")
        said: list[int] = []
        if messages:
            characters = sum(len(str(message.get("content", ""))) for message in messages)
            # Tokenizing megabytes takes seconds, and hardly a token is longer.
            if characters <= 64 * self.task.max_message_tokens:
                said = self.encode(messages)
            if not said or len(said) > self.task.max_message_tokens:
                limit = f"more than max_message_tokens = {self.task.max_message_tokens} allows"
                raise ValueError(f"its message of {characters} characters is {limit if characters else 'empty'}")
        room = self.max_tokens - len(whole.token_ids) - len(said)
        if room < 1:
            self._end(one, "length")
        whole.token_ids += said
        whole.logprobs += [0.0] * len(said)
        drawn += [False] * len(said)
        one.answer = asyncio.get_running_loop().create_future()
        seed = derive_seed(self.seed, "turn", self.numbers[index], one.turns)
        with self._changed:
            self._turns.append(Turn(index=index, tokens=[*one.prompt, *whole.token_ids], max_tokens=room, seed=seed))
            self._changed.notify()
        answer = await one.answer
        one.answer, one.busy_since = None, time.monotonic()
        whole.token_ids += answer.token_ids
        whole.logprobs += answer.logprobs
        drawn += [True] * len(answer.token_ids)
        if answer.routed_experts is not None:
            whole.routed_experts = joined(whole.routed_experts, answer.routed_experts)
        if answer.kept is not None:
            known = whole.kept or []
            between = len(whole.token_ids) - len(answer.token_ids) - len(known)
            whole.kept = [*known, *[torch.empty(0, dtype=torch.int32)] * between, *answer.kept]
        one.turns, whole.version, whole.finish_reason = one.turns + 1, answer.version, answer.finish_reason
        if answer.finish_reason == "length":
            self._end(one, "length")
        return self.decode(answer.token_ids)

    def _end(self, one: _Sequence, ended: EpisodeEnd) -> None:
        one.limit = ended
        raise TurnsOver(ended)

    # ------------------------------------------------------------------------------------------------ the engine's side

    @property
    def open(self) -> bool:
        """True while some sequence has not ended."""
        return self._finished < len(self._sequences)

    def waiting(self, wait: Wait) -> list[Turn]:
        """Return the turns that can be drawn now; see `Dialogue`.

        Raises:
            StoppedError: an environment blocks the thread in which all of them run.
        """
        if self._silent > self.task.time_limit + 2 * PATIENCE:
            raise StoppedError(
                f"An environment of {type(self.task).__name__} blocks all others: an `async` method of it has not come "
                f"back within time_limit = {self.task.time_limit:g} s. Make it a plain method, which runs in a thread."
            )
        begun = time.monotonic()
        deadline = begun + PATIENCE
        with self._changed:
            while wait != "no" and self.open and (left := deadline - time.monotonic()) > 0:
                if len(self._turns) == len(self._sequences) - self._finished or (self._turns and wait == "any"):
                    break
                if not self._changed.wait(min(left, TOGETHER) if self._turns else left) and self._turns:
                    break
            turns, self._turns = self._turns, []
        # What counts is how long this thread waited in vain: a machine that stood still stops all threads alike.
        waited = min(time.monotonic() - begun, PATIENCE)
        self._heard, self._silent = self._beats, self._silent + waited if self._beats == self._heard else 0.0
        return sorted(turns, key=lambda turn: turn.index)

    def has_ended(self, index: int) -> bool:
        """Return True where a sequence has ended."""
        return self._sequences[index].whole.episode is not None

    def answered(self, turn: Turn, completion: Completion) -> None:
        """Take the answer of a turn."""
        self._drawn += len(completion.token_ids)
        self._loop.call_soon_threadsafe(self._resume, turn.index, completion)

    def _resume(self, index: int, completion: Completion) -> None:
        answer = self._sequences[index].answer
        if answer is not None and not answer.done():
            answer.set_result(completion)

    def completions(self) -> list[Completion]:
        """Return every sequence as one completion, in the order of the rows."""
        return [one.whole for one in self._sequences]


def joined(known: Tensor | None, routes: Tensor) -> Tensor:
    """Return the experts of a sequence's tokens after one more turn, "tokens layers k".

    An engine computes the turns before again, where a token may take other experts than those with which it was drawn.

    Args:
        known: of the turns before; None at the first. Its last token's are not known yet.
        routes: of the whole sequence, as the last turn computed it.
    """
    return routes if known is None else torch.cat([known[:-1], routes[len(known) - 1 :]])
