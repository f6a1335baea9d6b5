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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.functional.mismatch import k3_divergence
from lit_qrl.loop.contracts import Learner, PendingRollout, Schedule
from lit_qrl.loop.hooks import rl_callbacks
from lit_qrl.loop.turns import TakesTurns
from lit_qrl.rollout.engine import EngineDiedError, InFlight, Pauses, Scores
from lit_qrl.run.checkpoint_files import when_written
from lit_qrl.seeding import derive_seed
from lit_qrl.types import Completion

log = logging.getLogger(__name__)


class RolloutPrefetcher(Schedule):
    """Keeps the rollouts of a run that are begun, in the order of their iterations.

    Args:
        staleness: iterations by which weights may be older than the learner that they draw for.
        in_flight: what becomes of keys and values when weights come while completions are drawn; `none`: none come.
    """

    def __init__(self, staleness: int, in_flight: InFlight = "none") -> None:
        super().__init__()
        self.staleness, self.in_flight = staleness, in_flight != "none"
        self.depth = 1
        """Rollouts that are begun ahead where weights come in flight."""
        self.weights_of: dict[int, int] = {}
        """The iteration whose weights a version has, where they come in flight."""
        self.pending: dict[int, PendingRollout] = {}
        self._over = -1
        """The last iteration whose rollout is not needed again."""
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[int, Future[None]] = {}
        self._moved: Future[Tensor | None] | None = None
        self._saved: list[Future[None]] = []
        """What the newest checkpoint waits for."""
        self._restored: list[dict[str, Any]] = []

    def due(self, iteration: int, iterations: int | None = None) -> bool:
        """Return whether new weights are published before an iteration: where something is to be drawn with them."""
        if self.in_flight or iteration % self.staleness == 0:
            return True
        begun = {*self.pending, *(saved["iteration"] for saved in self._restored)}
        return any(number not in begun for number in self._window(iteration, iterations))

    def _window(self, now: int, iterations: int | None) -> range:
        """Return the iterations whose rollouts are begun before the end of one."""
        end = now + self.depth if self.in_flight else now - now % self.staleness + self.staleness
        return range(now, (end if iterations is None or iterations <= 0 else min(end, iterations - 1)) + 1)

    def published(self, version: int, iteration: int) -> None:
        """Note whose weights a version has."""
        if self.in_flight:
            self.weights_of[version] = iteration

    def rollout_begins(self, position: int) -> None:
        """A rollout of which nothing was learned stays in the checkpoint itself."""

    def update_begins(self, iteration: int) -> None:
        """Leave the rollout of an iteration out of checkpoints from now on."""
        self._over = iteration

    # --------------------------------------------------------------------------------------------------------- drawing

    def extend(self, learner: Learner) -> None:
        """Begin what the published weights are to draw and is not under way: all up to the next publish."""
        self._restore(learner)
        data, trainer, now = learner.data, learner.trainer, learner.trainer.current_epoch
        missing = [number for number in self._window(now, trainer.max_epochs) if number not in self.pending]
        if not self.in_flight and now % self.staleness == 0 and now in self.pending and self.pending[now].weights < now:
            # scored before the engine draws on, while the learner updates on that
            self._moved = self._thread.submit(moved_since, learner, self.pending[now])
        for number in missing:
            start, slots = data.position, data.slots
            self.pending[number] = PendingRollout(number, now, start, data.next_problems(slots.groups, slots.own))
            self._submit(learner, self.pending[number])

    def measured(self, learner: Learner) -> None:
        """Log how far the published weights are from those that drew the iteration's rollout, where that was asked."""
        moved, self._moved = self._moved, None
        if moved is not None:
            note_staleness(learner, moved.result)

    def adjust(self, now: int) -> None:
        """Draw one rollout more ahead where the learner waits for this one, one fewer where the next is drawn, too.

        Args:
            now: the iteration that takes a rollout.
        """
        if now not in self.pending:
            return
        if self.pending[now].completions is None:
            self.depth = min(self.depth + 1, self.staleness)
        elif now + 1 in self.pending and self.pending[now + 1].completions is not None:
            self.depth = max(self.depth - 1, 1)

    def take(self, learner: Learner, count: int, numbers: Sequence[int]) -> PendingRollout:
        """Return the drawn rollout of this iteration; where the engine died, what it lacked is drawn by a new one.

        Raises:
            EngineDiedError: when no callback built the engine again.
        """
        state, now = learner.iteration, learner.trainer.current_epoch
        with state.timed("wait"):
            self.pending = {number: one for number, one in self.pending.items() if number >= now}
            self.adjust(now)
            self.extend(learner)
            while self.pending[now].completions is None:
                try:
                    self._futures[now].result()
                except EngineDiedError as error:
                    self._forget_undone(learner)
                    callbacks = rl_callbacks(learner.trainer)
                    revived = [callback.on_engine_died(learner.trainer, learner, error) for callback in callbacks]
                    if not any(revived):
                        raise
                    self.extend(learner)
            taken = self.pending[now]
            ages = self._ages(taken)
            state.metrics.value("rollout/age", sum(map(operator.mul, ages, ages.values())) / ages.total())
            engine = learner.data.engine
            if self.in_flight and any(ages) and isinstance(engine, Pauses):
                engine.pause()
                try:
                    with state.timed("verify"):
                        note_staleness(learner, partial(moved_since, learner, taken))
                finally:
                    engine.resume()
        state.drawing = taken.seconds
        return taken

    def _ages(self, taken: PendingRollout) -> Counter[int]:
        """Return how many tokens of a rollout were drawn by weights of which age."""
        completions = taken.completions or []
        if not self.in_flight:
            return Counter({taken.iteration - taken.weights: sum(len(one.token_ids) for one in completions)})
        found: Counter[int] = Counter()
        drawn = (one.versions or [one.version] * len(one.token_ids) for one in completions)
        for version, count in Counter(chain.from_iterable(drawn)).items():
            found[taken.iteration - self.weights_of[version]] += count
        return found

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
        self.pending, self._futures, self._moved, self._saved, self._restored = {}, {}, None, [], []

    @property
    def _thread(self) -> ThreadPoolExecutor:
        """The thread in which the engine is asked, one thing after the other."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        return self._pool

    def _submit(self, learner: Learner, pending: PendingRollout) -> None:
        data, before = learner.data, self._futures.get(pending.iteration - 1)
        seed = derive_seed(data.base_seed, "rollout", pending.iteration, 0, 0)
        positions: dict[str, Any] = {"positions": data.slots.own} if data.slots.world_size > 1 else {}
        prompts = [problem.prompt_ids for problem in pending.problems]

        def draw() -> None:
            error = before.exception() if before is not None else None
            if error is not None:
                raise error  # in their order, or not at all
            start = time.perf_counter()
            pending.completions = data.engine.generate(prompts, data.group_size, seed, **positions)
            pending.seconds = time.perf_counter() - start

        self._futures[pending.iteration] = self._thread.submit(draw)

    def _forget_undone(self, learner: Learner) -> None:
        """Forget what was not drawn, as if it had never been begun."""
        wait([self._futures[one.iteration] for one in self.pending.values() if one.iteration in self._futures])
        undone = [one for one in self.pending.values() if one.completions is None]
        if undone:
            learner.data.position = min(one.start for one in undone)
        for one in undone:
            del self.pending[one.iteration]
            self._futures.pop(one.iteration, None)

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def state(self, position: int, alone: bool) -> dict[str, Any]:
        """Return the position in the stream of prompts, and what continues the run of now bit for bit.

        A checkpoint that is written in the background waits there for the rollouts that are under way now. Where
        weights come in flight it has only those that are drawn now: the others will have tokens of weights that it does
        not know. In several processes, of which one writes it, it has none. The run that goes on draws what it lacks
        with its own, younger weights.

        Args:
            position: of the prompt after all that is begun.
            alone: whether this is the only process.
        """
        oldest = self._over + 1 - self.staleness
        later = [one for number, one in sorted(self.pending.items()) if number > self._over]
        undone = (one for one in later if not alone or (self.in_flight and one.completions is None))
        first_undone = next(undone, None)
        self._saved = under_way = [] if self.in_flight or not alone else list(self._futures.values())
        weights = {str(version): number for version, number in self.weights_of.items() if number >= oldest}

        @cache
        def made() -> tuple[int, dict[str, Any]]:
            for future in under_way:
                with suppress(CancelledError):  # the run has ended
                    future.exception()
            kept, after = [], position
            for one in later:
                if one is first_undone or one.completions is None:
                    after = one.start
                    break
                place = {"iteration": one.iteration, "weights": one.weights, "start": one.start}
                kept.append({**place, "completions": [packed(completion) for completion in one.completions]})
            if len(kept) < len(later):
                log.info("%d pending rollouts are not in the checkpoint.", len(later) - len(kept))
            return after, {"drafts": kept, "weights": weights}

        return {"position": when_written(lambda: made()[0]), "ahead": when_written(lambda: made()[1])}

    def load(self, state: Mapping[str, Any], alone: bool) -> int:
        """Continue from a state; what it has drawn is made whole at the first iteration, and by several drawn anew."""
        if "ahead" not in state:
            return state["position"]
        saved = state["ahead"]
        known = all("completions" in one for one in saved["drafts"])  # an earlier version had them in other words
        self._restored = list(saved["drafts"]) if alone and known else []
        self.weights_of = {int(version): number for version, number in saved.get("weights", {}).items()}
        return state["position"] if self._restored else super().load(state, alone)

    def _restore(self, learner: Learner) -> None:
        saved, self._restored = self._restored, []
        data = learner.data
        for one in saved:
            problems = data.problems_at(one["start"], data.slots.own)
            completions = [unpacked(completion) for completion in one["completions"]]
            drawn = PendingRollout(one["iteration"], one["weights"], one["start"], problems, completions)
            self.pending[drawn.iteration] = drawn


SCORED, FEW, TOKENS = 32, 2, 2**11
"""Sequences that show how far new weights are from those that drew them: so many at most, and these anyhow where they
have more tokens. The engine draws nothing meanwhile: 2**13 tokens of an 8B were a twelfth of a rollout of 32 × 512."""


@torch.no_grad()
def moved_since(learner: Learner, pending: PendingRollout) -> Tensor | None:
    """Return how far the published weights are from the older ones that drew a rollout: Δ log p of some tokens.

    It is the part of the mismatch that comes of the schedule, both in the sampler's arithmetic; the rest is that of
    kernels, format and noise. None where the engine does not score, or log-probs are not at a temperature of 1.

    Args:
        learner: whose engine holds the new weights and draws nothing.
        pending: of the iteration under way, drawn by older ones.
    """
    data, engine = learner.data, learner.data.engine
    if not isinstance(engine, Scores) or data.temperature != 1.0 or data.sampling.truncated or not pending.completions:
        return None
    chosen = [(i, one) for i, one in enumerate(pending.completions[:SCORED]) if one.token_ids]
    prompts = [pending.problems[i // data.group_size].prompt_ids for i, _ in chosen]
    sequences = [[*prompt, *one.token_ids] for prompt, (_, one) in zip(prompts, chosen, strict=True)]
    within = sum(whole <= TOKENS for whole in accumulate(map(len, sequences)))
    chosen, sequences = chosen[: max(within, FEW)], sequences[: max(within, FEW)]
    scores = engine.score(sequences)
    new = torch.cat([row[-len(one.token_ids) :] for row, (_, one) in zip(scores, chosen, strict=True)])
    old = torch.tensor([value for _, one in chosen for value in one.logprobs])
    return new.float().cpu() - old


def note_staleness(learner: Learner, measure: Callable[[], Tensor | None]) -> None:
    """Log what `moved_since` returns; an engine that dies of being asked draws the rest anew."""
    try:
        moved = measure()
    except RuntimeError as error:
        log.info("Staleness was not measured: %s", error)
        return
    if moved is not None:
        learner.iteration.metrics.values("mismatch/staleness_abs", moved.abs())
        learner.iteration.metrics.values("mismatch/staleness_kl", k3_divergence(moved))


LISTS = {"token_ids": torch.long, "logprobs": torch.float64, "versions": torch.long}
"""Of a completion: what a checkpoint holds as a tensor, which is read at once."""


def packed(completion: Completion) -> dict[str, Any]:
    """Return a completion for a checkpoint.

    >>> one = Completion(token_ids=[3, 4], logprobs=[-0.1, -0.2], finish_reason="stop", version=7)
    >>> unpacked(packed(one)) == one
    True
    """
    saved = {one.name: getattr(completion, one.name) for one in fields(completion)}
    lists = {name: dtype for name, dtype in LISTS.items() if saved[name] is not None}
    return saved | {name: torch.tensor(saved[name], dtype=dtype) for name, dtype in lists.items()}


def unpacked(saved: Mapping[str, Any]) -> Completion:
    """Return the completion of `packed`."""
    lists = {name: saved[name].tolist() for name in LISTS if saved[name] is not None}
    return Completion(**{**saved, **lists})


def schedule_of(schedule: str, max_staleness: int, in_flight: InFlight = "none") -> Schedule:
    """Return what says which weights draw which rollout.

    Args:
        schedule: `on_policy`, `one_step_off` or `async`.
        max_staleness: of `async`.
        in_flight: what becomes of keys and values when weights come while completions are drawn.

    Raises:
        ConfigError: for a staleness or updates that do not fit it.

    >>> type(schedule_of("on_policy", 1)).__name__, schedule_of("async", 4).staleness
    ('Schedule', 4)
    """
    check_choice("data.schedule", schedule, ("on_policy", "one_step_off", "async"))
    check_choice("data.in_flight_updates", in_flight, ("none", "keep", "recompute"))
    if max_staleness < 1 or (schedule != "async" and max_staleness != 1):
        raise ConfigError(
            "data.max_staleness does not fit data.schedule.",
            expected="1 or more with schedule async, else nothing",
            given=f"{max_staleness} with {schedule}",
            remedy="Set data.schedule to async, or leave max_staleness out.",
        )
    if in_flight != "none" and schedule != "async":
        raise ConfigError(
            "data.in_flight_updates does not fit data.schedule.",
            expected="none, or with schedule async keep or recompute",
            given=f"{in_flight} with {schedule}",
            remedy="Set data.schedule to async, or leave in_flight_updates out.",
        )
    return Schedule() if schedule == "on_policy" else RolloutPrefetcher(max_staleness, in_flight)


def check_ahead(learner: Learner, schedule: str) -> None:
    """Raise `ConfigError` where rollouts cannot be drawn while the learner updates.

    Args:
        learner: with engine, objective and policy.
        schedule: for the error.
    """
    engine, task = learner.data.engine, learner.data.task
    given, remedy = None, "Set data.schedule to on_policy."
    if not engine.overlaps:
        given = f"data.engine: {type(engine).__name__}, which shares the learner's memory"
        remedy = "Set data.engine to RemoteVLLMEngine."
    elif learner.objective.filter_zero_variance:
        given = "objective.filter_zero_variance, which draws again when rewards are known"
        remedy = "Set it to false, or data.schedule to on_policy."
    elif isinstance(task, TakesTurns):
        given = f"data.task: {type(task).__name__}, whose environments answer while it draws"
    elif learner.policy.denoises:
        given = f"{type(learner.policy).__name__}, whose sampler estimates log-probs again for each pass"
    if given is not None:
        raise ConfigError(
            f"data.schedule: {schedule} generates during updates, which this configuration does not support.",
            given=given,
            remedy=remedy,
        )
    check_in_flight(learner)


def check_in_flight(learner: Learner) -> None:
    """Raise `ConfigError` where weights cannot come while completions are drawn, though they should.

    Args:
        learner: with its engine.
    """
    data, engine = learner.data, learner.data.engine
    if not data.schedule.in_flight:
        return
    given, invariant = type(getattr(engine, "engine", engine)).__name__, engine.batch_invariant
    remedy = "Leave data.in_flight_updates out."
    if not isinstance(engine, Pauses):
        raise ConfigError(
            "data.in_flight_updates gives the engine weights between two of its steps, which it cannot take.",
            expected="data.engine: RemoteVLLMEngine",
            given=given,
            remedy=remedy,
        )
    if torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            "trainer.deterministic asks for the same bits in every run, and time says which weights draw which token "
            "where they come in flight.",
            expected="data.in_flight_updates: none",
            remedy="Leave it out: data.schedule: async alone draws the same in every run.",
        )
    if invariant:
        raise ConfigError(
            "data.engine.batch_invariant promises that learner and sampler agree to the last bit; no learner agrees "
            "with a completion that two versions drew.",
            expected="data.in_flight_updates: none",
            given=f"{given} with batch_invariant: true",
            remedy=remedy,
        )
