"""Rollouts that are drawn before their iteration begins, while the learner updates on earlier ones.

With a staleness of k the weights of iteration n, a multiple of k, draw the rollouts of n + 1 to n + k one after the
other in a thread, and the first of all draw their own too. So the engine waits for an update every k iterations alone,
and no rollout is more than k iterations older than the learner that it updates. All of it follows from the settings:
the prompts, their order, their seeds and which weights drew them. The sampler's log-probs are those of its older
weights; corrections take them for what they are.

Where weights come in flight, each iteration publishes its own between two steps of the engine, and rollouts are begun
one ahead, or up to k where the learner has to wait: what is drawn earlier than it is needed is only older. Then time
says which weights drew which token, and each token's version is recorded.
"""

import logging
import operator
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from typing import Any

from torch import Tensor

from lit_qrl.loop.drafts import Draft, packed, unpacked, versions_of
from lit_qrl.loop.hooks import Learner, rl_callbacks
from lit_qrl.loop.record import FlightRecord, rollout_seed
from lit_qrl.loop.replay import Replay
from lit_qrl.loop.schedule import staleness_of
from lit_qrl.loop.staleness import moved_since, note_staleness
from lit_qrl.rollout.engine import EngineDiedError, InFlight
from lit_qrl.run.checkpoint_files import when_written
from lit_qrl.run.event_log import tell

log = logging.getLogger(__name__)


class Ahead:
    """Keeps the drafts of a run in the order of their iterations.

    Args:
        staleness: iterations by which weights may be older than the learner that they draw for.
        in_flight: what becomes of keys and values when weights come while completions are drawn; `none`: none come.
        replay: the record that this run follows.
    """

    def __init__(self, staleness: int, in_flight: InFlight = "none", replay: Replay | None = None) -> None:
        self.staleness, self.in_flight, self.replay = staleness, in_flight != "none", replay
        self.record = FlightRecord({})
        """Where weights in flight met the engine."""
        self.depth = 1
        """Rollouts that are begun ahead where weights come in flight."""
        self.weights_of: dict[int, int] = {}
        """The iteration whose weights a version has, where they come in flight."""
        self.drafts: dict[int, Draft] = {}
        self.over = -1
        """The last iteration whose rollout is not needed again."""
        self.tokens_of_age: dict[int, int] = {}
        """Tokens that were learned from, by how many iterations older their weights were."""
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[int, Future[None]] = {}
        self._moved: Future[Tensor | None] | None = None
        self._saved: list[Future[None]] = []
        """What the newest checkpoint waits for."""
        self._restored: list[dict[str, Any]] = []

    def due(self, iteration: int, iterations: int | None = None) -> bool:
        """Return whether new weights are published before an iteration: where something is to be drawn with them.

        Args:
            iteration: that begins.
            iterations: of the run; None or a negative number has no end.
        """
        if self.in_flight or iteration % self.staleness == 0:
            return True
        begun = {*self.drafts, *(saved["iteration"] for saved in self._restored)}
        return any(number not in begun for number in self._window(iteration, iterations))

    def _window(self, now: int, iterations: int | None) -> range:
        """Return the iterations whose rollouts are begun before the end of one."""
        end = now + self.depth if self.in_flight else now - now % self.staleness + self.staleness
        return range(now, (end if iterations is None or iterations <= 0 else min(end, iterations - 1)) + 1)

    def published(self, version: int, iteration: int) -> None:
        """Note whose weights a version has."""
        if self.in_flight:
            self.weights_of[version] = iteration

    # --------------------------------------------------------------------------------------------------------- drawing

    def extend(self, learner: Learner) -> None:
        """Begin what the published weights are to draw and is not under way: all up to the next publish."""
        self._restore(learner)
        trainer, now = learner.trainer, learner.trainer.current_epoch
        missing = [number for number in self._window(now, trainer.max_epochs) if number not in self.drafts]
        if not self.in_flight and now % self.staleness == 0 and now in self.drafts and self.drafts[now].weights < now:
            self._score(learner, self.drafts[now])
        for number in missing:
            data = learner.data
            start, slots = data.position, data.slots
            self.drafts[number] = Draft(number, now, start, data.next_problems(slots.groups, slots.own))
            self._submit(learner, self.drafts[number])

    def _score(self, learner: Learner, draft: Draft) -> None:
        """Have the engine score what older weights drew before it draws on, while the learner updates on that."""
        self._moved = self._thread.submit(moved_since, learner, draft)

    def tell_staleness(self, learner: Learner) -> None:
        """Log how far the published weights are from those that drew the iteration's rollout, where that was asked."""
        moved, self._moved = self._moved, None
        if moved is not None:
            try:
                note_staleness(learner, moved.result())
            except RuntimeError as error:  # it died of it, of which the next draft tells
                log.info("Staleness was not measured: %s", error)

    def adjust(self, now: int) -> None:
        """Draw one rollout more ahead where the learner waits for this one, one fewer where the next is drawn, too.

        Args:
            now: the iteration that takes a rollout.
        """
        if now not in self.drafts:
            return
        if self.drafts[now].completions is None:
            self.depth = min(self.depth + 1, self.staleness)
        elif now + 1 in self.drafts and self.drafts[now + 1].completions is not None:
            self.depth = max(self.depth - 1, 1)

    def take(self, learner: Learner) -> Draft:
        """Return the drawn rollout of this iteration; where the engine died, what it lacked is drawn by a new one.

        Raises:
            EngineDiedError: when no callback built the engine again.
        """
        now = learner.trainer.current_epoch
        for number in [number for number in self.drafts if number < now]:
            del self.drafts[number]
        if self.replay is None:
            self.adjust(now)
        else:
            self.depth = self.replay.depth(now)
        self.extend(learner)
        while self.drafts[now].completions is None:
            try:
                self._futures[now].result()
            except EngineDiedError as error:
                self._forget_undone(learner)
                revived = [one.on_engine_died(learner.trainer, learner, error) for one in rl_callbacks(learner.trainer)]
                if not any(revived):
                    raise
                self.extend(learner)
        draft = self.drafts[now]
        assert draft.completions is not None
        ages = self._ages(draft)
        learner.iteration.metrics.value("rollout/age", sum(map(operator.mul, ages, ages.values())) / ages.total())
        for age, tokens in ages.items():
            self.tokens_of_age[age] = self.tokens_of_age.get(age, 0) + tokens
        if self.in_flight and any(ages):
            self.record.stood("score", learner.data.engine.pause())
            try:
                with learner.iteration.timed("verify"):
                    note_staleness(learner, moved_since(learner, draft))
            except RuntimeError as error:  # it died of what it drew meanwhile, of which the next draft tells
                log.info("Staleness was not measured: %s", error)
            finally:
                learner.data.engine.resume()
        if self.in_flight:
            note(learner, self.record.write(learner, self.depth, draft), self.replay)
        return draft

    def _ages(self, draft: Draft) -> Counter[int]:
        """Return how many tokens of a rollout were drawn by weights of which age."""
        assert draft.completions is not None
        if not self.in_flight:
            return Counter({draft.iteration - draft.weights: sum(len(one.token_ids) for one in draft.completions)})
        versions = Counter(version for one in draft.completions for version in versions_of(one))
        return sum(
            (Counter({draft.iteration - self.weights_of[version]: count}) for version, count in versions.items()),
            Counter(),
        )

    @property
    def drawing(self) -> bool:
        """True while the engine draws, or has more to draw."""
        return any(not future.done() for future in self._futures.values())

    @property
    def failed(self) -> bool:
        """True where the engine has died of what is under way."""
        return any(future.done() and future.exception() is not None for future in self._futures.values())

    def settle(self, learner: Learner) -> EngineDiedError | None:
        """Wait until nothing is under way; return the engine's death, after which what it lacked is not begun."""
        under_way: list[Future[Any]] = [*self._futures.values()]
        wait([*under_way, self._moved] if self._moved is not None else under_way)
        errors = [error for future in self._futures.values() if (error := future.exception()) is not None]
        self._futures = {}
        if not errors:
            return None
        self._forget_undone(learner)
        for error in errors:
            if not isinstance(error, EngineDiedError):
                raise error
        return errors[0]  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Begin nothing more, once there is what a checkpoint waits for."""
        wait(self._saved)
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self.drafts, self._futures, self._moved, self._saved, self._restored = {}, {}, None, [], []

    @property
    def _thread(self) -> ThreadPoolExecutor:
        """The thread in which the engine is asked, one thing after the other."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        return self._pool

    def _submit(self, learner: Learner, draft: Draft) -> None:
        data, before = learner.data, self._futures.get(draft.iteration - 1)
        seed = rollout_seed(data.base_seed, draft.iteration)
        self.record.name(seed, draft.iteration)
        positions = {"positions": data.slots.own} if data.slots.world_size > 1 else {}
        prompts = [problem.prompt_ids for problem in draft.problems]

        def draw() -> None:
            error = before.exception() if before is not None else None
            if error is not None:
                raise error  # in their order, or not at all
            start = time.perf_counter()
            draft.completions = data.engine.generate(prompts, data.group_size, seed, **positions)
            draft.seconds = time.perf_counter() - start

        self._futures[draft.iteration] = self._thread.submit(draw)

    def _forget_undone(self, learner: Learner) -> None:
        """Forget what was not drawn, as if it had never been begun."""
        undone = [draft for draft in self.drafts.values() if draft.completions is None]
        wait([future for number, future in self._futures.items() if number in {draft.iteration for draft in undone}])
        self._forget(learner, [draft for draft in self.drafts.values() if draft.completions is None])

    def _forget(self, learner: Learner, drafts: Sequence[Draft]) -> None:
        if drafts:
            learner.data.position = min(draft.start for draft in drafts)
        for draft in drafts:
            del self.drafts[draft.iteration]
            self._futures.pop(draft.iteration, None)

    # ---------------------------------------------------------------------------------------------------------- replay

    def begins_anew(self, learner: Learner) -> bool:
        """Return whether another process went on here with the run that is followed: it had what its checkpoint had.

        Args:
            learner: whose engine is to be built again then.
        """
        now, replay = learner.trainer.current_epoch, self.replay
        if replay is None or not replay.under_way or not replay.begins(now):
            return False
        self.settle(learner)
        kept = replay.stretch(now).kept
        self._forget(learner, [one for number, one in self.drafts.items() if number >= now and number not in kept])
        self.record.begin(learner, kept)
        return True

    def follow(self, learner: Learner) -> None:
        """Tell a new engine where it is to stand still, where a record is followed."""
        now, replay = learner.trainer.current_epoch, self.replay
        if replay is None or (replay.under_way and not replay.begins(now)):
            return
        if not replay.under_way:
            replay.begin(now, [one["iteration"] for one in self._restored])
            tell(learner.trainer, "replay", replay.sentence(learner.trainer.max_epochs))
        learner.data.engine.follow(replay.courses(now, learner.data.base_seed))

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def state(self, position: int, alone: bool) -> dict[str, Any]:
        """Return the position in the stream of prompts, and what continues the run of now bit for bit.

        A checkpoint that is written in the background waits there for the rollouts that are under way now. Where
        weights come in flight it has only those that are drawn now: the others will have tokens of weights that it does
        not know. In several processes, of which one writes it, it has none. The run that goes on draws what it lacks
        with its own, younger weights.

        Args:
            position: of the prompt after all drafts.
            alone: whether this is the only process.
        """
        oldest = self.over + 1 - self.staleness
        later = [draft for number, draft in sorted(self.drafts.items()) if number > self.over]
        undone = (draft for draft in later if not alone or (self.in_flight and draft.completions is None))
        first_undone = next(undone, None)
        self._saved = under_way = [] if self.in_flight or not alone else list(self._futures.values())
        ages = {str(age): count for age, count in self.tokens_of_age.items()}
        weights = {str(version): number for version, number in self.weights_of.items() if number >= oldest}

        @cache
        def made() -> tuple[int, dict[str, Any]]:
            for future in under_way:
                with suppress(CancelledError):  # the run has ended
                    future.exception()
            kept, after = [], position
            for draft in later:
                if draft is first_undone or draft.completions is None:
                    after = draft.start
                    break
                place = {"iteration": draft.iteration, "weights": draft.weights, "start": draft.start}
                kept.append({**place, **packed(draft.completions)})
            if len(kept) < len(later):
                log.info("%d rollouts that were begun are not in the checkpoint.", len(later) - len(kept))
            return after, {"drafts": kept, "ages": ages, "weights": weights}

        return {"position": when_written(lambda: made()[0]), "ahead": when_written(lambda: made()[1])}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the drafts are made whole at the first iteration."""
        self._restored = list(state["drafts"])
        self.tokens_of_age = {int(age): count for age, count in state["ages"].items()}
        self.weights_of = {int(version): number for version, number in state.get("weights", {}).items()}

    def _restore(self, learner: Learner) -> None:
        saved, self._restored = self._restored, []
        data = learner.data
        if self.in_flight and not self.record.begun:
            self.record.begin(learner, [one["iteration"] for one in saved])
        for one in saved:
            problems = data.problems_at(one["start"], data.slots.own)
            draft = Draft(one["iteration"], one["weights"], one["start"], problems, unpacked(one))
            self.drafts[draft.iteration] = draft


def resumed_position(ahead: Ahead | None, state: Mapping[str, Any], position: int, alone: bool) -> int:
    """Return the position in the stream of prompts of a run that goes on from a `state`, which it loads.

    Args:
        ahead: of the run; None draws in turns.
        state: of the run before, which drew ahead.
        position: of the prompt after all its drafts.
        alone: whether this is the only process; several draw them anew, as a run does that draws in turns.
    """
    drafts = state["drafts"] if alone and ahead is not None else []
    if ahead is not None:
        ahead.load({**state, "drafts": drafts})
    return position if drafts or not state["drafts"] else state["drafts"][0]["start"]


def tell_ages(learner: Learner) -> str:
    """Return what share of the run's tokens was drawn by weights of which age, as a sentence; empty where all were new.

    Args:
        learner: of a run that has ended.
    """
    counts = {} if learner.data.ahead is None else learner.data.ahead.tokens_of_age
    if not any(counts):
        return ""
    whole = sum(counts.values())
    shares = [f"{count / whole:.1%} {age}" for age, count in sorted(counts.items())]
    return f"Tokens by the age in iterations of the weights that drew them: {', '.join(shares)} old."


def ahead_of(
    schedule: str, max_staleness: int, in_flight: InFlight = "none", replay: str | None = None
) -> Ahead | None:
    """Return what draws ahead under a schedule, or None; the arguments and errors are those of `staleness_of`."""
    staleness = staleness_of(schedule, max_staleness, in_flight, replay)
    return Ahead(staleness, in_flight, None if replay is None else Replay(replay)) if staleness else None


def note(learner: Learner, row: Mapping[str, Any], replay: Replay | None) -> None:
    """Say where a run leaves the record that it follows."""
    words = "" if replay is None else replay.compare(row)
    if words:
        tell(learner.trainer, "replay_astray", words)
