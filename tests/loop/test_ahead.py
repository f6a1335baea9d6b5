"""Rollouts drawn while the learner updates: which weights draw what, in any order of events."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lit_qrl.callbacks import RunCheckpoint, TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.loop.contracts import PendingRollout
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.schedule import RolloutPrefetcher
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.types import Completion
from tests.tables import csv_rows
from tests.tiny_run import build, parameters_of

ONE_OFF, THREE_OFF = {"schedule": "one_step_off"}, {"schedule": "async", "max_staleness": 3}


class Apart(TransformersEngine):
    """Shares nothing with the learner, so it may draw in another thread; notes what it draws with which weights."""

    overlaps = True

    def __init__(self, dies_at=()):
        super().__init__(share="never")
        self.dies_at, self.calls, self.threads = list(dies_at), 0, set()

    def generate(self, *args, **kwargs):
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self.calls in self.dies_at:
            self._whole = False
            raise EngineDiedError("as the test wants")
        return super().generate(*args, **kwargs)


class Watch(RLCallback):
    def __init__(self):
        self.versions, self.prompts, self.tokens = [], [], []

    def on_rollout_end(self, trainer, module, batch):
        self.versions.append(sorted(set(batch.version.tolist())))
        self.prompts.append([problem.prompt_text for problem in module.iteration.problems])
        self.tokens.append(batch.tokens.clone())


class StopAfter(Callback):
    def __init__(self, iterations):
        self.iterations = iterations

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch + 1 == self.iterations:
            trainer.should_stop = True


def fit(folder, data, epochs=7, engine=None, callbacks=(), ckpt_path=None, **options):
    watch = Watch()
    options.setdefault("trainer", {})["max_epochs"] = epochs
    trainer, module, data = build(
        folder, engine=engine or Apart(), data=data, callbacks=[watch, TruncatedIS(), *callbacks], **options
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return SimpleNamespace(
        watch=watch, weights=parameters_of(module), data=data, trainer=trainer, module=module, folder=folder / "run"
    )


def rows(run):
    return [row for row in csv_rows(run.folder / "metrics.csv") if row.get("publish/version") or row.get("rollout/age")]


@pytest.mark.parametrize(
    ("schedule", "versions"), [(ONE_OFF, [0, 0, 1, 2, 3, 4, 5]), (THREE_OFF, [0, 0, 0, 0, 1, 1, 1])]
)
def test_every_rollout_is_drawn_by_the_weights_that_the_schedule_says(tmp_path, schedule, versions):
    on_policy = fit(tmp_path / "on", {})
    run = fit(tmp_path / "ahead", schedule)
    assert run.watch.versions == [[version] for version in versions]
    assert run.watch.prompts == on_policy.watch.prompts
    assert torch.equal(run.watch.tokens[0], on_policy.watch.tokens[0])  # the same weights and seeds
    assert ages(run) == [i - run_at(i, schedule) for i in range(7)]
    assert run.data.engine.threads == {"prefetch_0"}


def ages(run):
    return [float(row["rollout/age"]) for row in rows(run)]


def run_at(iteration, schedule):
    k = schedule.get("max_staleness", 1)
    return max(iteration - 1, 0) // k * k


def test_log_probs_are_those_of_the_weights_that_drew(tmp_path):
    """Without a step the learner stays where it is: what is left between the two is rounding."""
    run = fit(tmp_path / "still", ONE_OFF, epochs=4, lr=0.0, format="fp32")
    moved = fit(tmp_path / "moving", ONE_OFF, epochs=4, lr=3e-2, format="fp32")
    still, moving = ([float(row["mismatch/kl_k3"]) for row in rows(one)] for one in (run, moved))
    assert max(still) < 1e-8
    assert min(moving[1:]) > 1e-3
    in_flight = flight(tmp_path / "flight", epochs=4, waits=False, lr=0.0, format="fp32")
    assert max(float(row["mismatch/kl_k3"]) for row in rows(in_flight)) < 1e-8
    # All of it is staleness where nothing is quantized, on sequences that the engine scores again.
    stale = [float(row["mismatch/staleness_kl"]) for row in rows(moved)[1:]]
    assert stale == pytest.approx(moving[1:], rel=1e-3)


@pytest.mark.parametrize("schedule", [ONE_OFF, THREE_OFF], ids=["one_step_off", "async"])
def test_a_run_that_goes_on_is_the_same_run(tmp_path, schedule):
    whole = fit(tmp_path / "whole", schedule)
    cut = fit(tmp_path / "cut", schedule, callbacks=[StopAfter(5)])
    rest = fit(tmp_path / "rest", schedule, ckpt_path=str(cut.folder / "checkpoints" / "last.ckpt"))
    assert torch.equal(rest.weights, whole.weights)
    assert rest.watch.versions == whole.watch.versions[5:]
    assert ages(rest) == ages(whole)[5:]


class Held(Apart):
    """Draws two rollouts, and the others when it is let."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()

    def generate(self, *args, **kwargs):
        if self.calls >= 2:
            assert self.goes_on.wait(60)
        return super().generate(*args, **kwargs)


class Saving(Callback):
    """Has a run saved as often as told, and an engine go on when the first iteration is over."""

    def __init__(self, engine=None, **options):
        self.engine, self.options = engine, options

    def on_fit_start(self, trainer, pl_module):
        (saves,) = [one for one in trainer.callbacks if isinstance(one, RunCheckpoint)]
        vars(saves).update(self.options)

    def on_train_epoch_start(self, trainer, pl_module):
        if self.engine is not None and trainer.current_epoch == 1:
            self.engine.goes_on.set()


def test_a_run_that_ends_waits_for_what_its_checkpoint_is_to_hold(tmp_path, monkeypatch):
    whole, engine, close = fit(tmp_path / "whole", THREE_OFF), Held(), RolloutPrefetcher.close

    def let_go(ahead):
        engine.goes_on.set()
        close(ahead)

    monkeypatch.setattr(RolloutPrefetcher, "close", let_go)
    cut = fit(tmp_path / "cut", THREE_OFF, engine=engine, callbacks=[Saving(every_n_iterations=0), StopAfter(2)])
    rest = fit(tmp_path / "rest", THREE_OFF, ckpt_path=str(cut.folder / "checkpoints" / "last.ckpt"))
    assert torch.equal(rest.weights, whole.weights)
    assert rest.watch.versions == whole.watch.versions[2:]


def test_a_save_does_not_wait_for_what_is_drawn_and_holds_it_all_the_same(tmp_path):
    whole = fit(tmp_path / "whole", THREE_OFF)
    engine = Held()
    cut = fit(tmp_path / "cut", THREE_OFF, engine=engine, callbacks=[Saving(engine, keep_every=1), StopAfter(3)])
    rest = fit(tmp_path / "rest", THREE_OFF, ckpt_path=str(cut.folder / "checkpoints" / "iteration-1.ckpt"))
    assert torch.equal(rest.weights, whole.weights)
    assert rest.watch.versions == whole.watch.versions[1:]


def test_a_run_that_goes_on_in_turns_poses_the_same_prompts(tmp_path):
    whole = fit(tmp_path / "whole", {})
    cut = fit(tmp_path / "cut", THREE_OFF, callbacks=[StopAfter(4)])
    rest = fit(tmp_path / "rest", {}, ckpt_path=str(cut.folder / "checkpoints" / "last.ckpt"))
    assert rest.watch.prompts == whole.watch.prompts[4:]


@pytest.mark.parametrize("dies_at", [[1], [3], [5, 6]])
def test_what_an_engine_died_of_is_drawn_again_with_the_same_prompts(tmp_path, dies_at):
    whole = fit(tmp_path / "whole", THREE_OFF)
    run = fit(tmp_path / "died", THREE_OFF, engine=Apart(dies_at))
    assert run.watch.prompts == whole.watch.prompts
    assert max(ages(run)) <= 3
    deaths = [one for one in read_jsonl(run.folder / "events.jsonl") if one["kind"] == "engine_died"]
    assert len(deaths) == len(dies_at)
    if dies_at == [1]:  # nothing was learned yet, so the weights are the same
        assert torch.equal(run.weights, whole.weights)


@pytest.mark.parametrize("dies_at", [2, 3])
def test_a_run_goes_on_that_ended_when_not_all_was_drawn(tmp_path, dies_at):
    whole = fit(tmp_path / "whole", THREE_OFF)
    cut = fit(tmp_path / "cut", THREE_OFF, engine=Apart([dies_at]), callbacks=[StopAfter(1)])
    rest = fit(tmp_path / "rest", THREE_OFF, ckpt_path=str(cut.folder / "checkpoints" / "last.ckpt"))
    assert rest.watch.prompts == whole.watch.prompts[1:]
    assert max(ages(rest)) <= 3


def test_evaluations_wait_for_what_is_drawn_and_change_nothing(tmp_path):
    plain = fit(tmp_path / "plain", THREE_OFF)
    often = fit(tmp_path / "often", THREE_OFF, trainer={"limit_val_batches": 1})
    assert torch.equal(plain.weights, often.weights)


class Flying(Apart):
    """Takes weights between two steps of a rollout; each draw but the first waits for some after its second step."""

    def __init__(self, dies_at=(), waits=True, dies_of=None):
        super().__init__(dies_at)
        self.waits, self.dies_of, self.changed = waits, dies_of, threading.Condition()
        self.drawing = self.wanted = self.stands = self.broken = False
        self.rollout = None

    def generate(self, prompts, n, seed, progress=None, sampling=None, positions=None, finished=None):
        if sampling is not None:  # an evaluation
            return super().generate(prompts, n, seed, progress, sampling, positions, finished)
        with self.changed:
            self.changed.wait_for(lambda: not self.wanted)
            self.drawing, began_with, self.broken = True, self.version, False
            self.rollout = seed
        one = replace(self.spec.sampling, max_tokens=1)
        empty = {"finish_reason": "length", "version": began_with}
        drawn = [Completion(token_ids=[], logprobs=[], **empty) for _ in prompts for _ in range(n)]
        try:
            for step in range(self.spec.sampling.max_tokens):
                left = [i for i, row in enumerate(drawn) if row.finish_reason == "length"]
                if not left:
                    break
                if step:
                    self.between(step, began_with)
                asked = [[*prompts[i // n], *drawn[i].token_ids] for i in left]
                draw = super().generate if step == 0 else super(Apart, self).generate
                for i, token in zip(left, draw(asked, 1, seed + step, None, one, left), strict=True):
                    row = drawn[i]
                    row.token_ids += token.token_ids
                    row.logprobs += token.logprobs
                    row.versions = [*(row.versions or [row.version] * step), token.version]
                    row.finish_reason = token.finish_reason
            return [replace(row) for row in drawn]
        finally:
            with self.changed:
                self.drawing = False
                self.changed.notify_all()

    def between(self, step, began_with):
        with self.changed:
            while self.wanted or (
                self.waits and self.calls > 1 and step == 2 and self.version == began_with and not self.broken
            ):
                self.changed.wait_for(lambda: self.wanted)
                self.stands = True
                self.changed.notify_all()
                self.changed.wait_for(lambda: not self.wanted)
                self.stands = False
        if self.broken:
            raise EngineDiedError("what came was not whole")

    def pause(self):
        with self.changed:
            self.wanted = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.stands or not self.drawing)

    def resume(self, whole=True):
        with self.changed:
            self.wanted, self.broken = False, not whole
            self.changed.notify_all()

    @contextmanager
    def staged(self, until):
        until()
        yield

    def load_weights(self, tensors, format, version):
        if self.dies_of == version:
            self.dies_of, self.waits = None, False  # the learner needs at once what it draws again
            raise EngineDiedError("of a publish")
        return super().load_weights(tensors, format, version)


class Tokens(RLCallback):
    """Notes the versions of each rollout's tokens, and what a correction sees of them."""

    def __init__(self):
        self.rows, self.seen = [], []

    def on_rollout_end(self, trainer, module, batch):
        drawn = zip(batch.versions if batch.versions is not None else batch.version[:, None], batch.mask, strict=True)
        self.rows.append([row[mask].tolist() for row, mask in drawn] if batch.versions is not None else None)

    def correct(self, trainer, module, context):
        self.seen.append(context.versions)


FLIGHT = {"schedule": "async", "max_staleness": 2, "in_flight_updates": "keep"}


def flight(folder, epochs=5, waits=True, dies_at=(), dies_of=None, **options):
    tokens = Tokens()
    options.setdefault("callbacks", [])
    options["callbacks"] = [tokens, *options["callbacks"]]
    run = fit(folder, {**FLIGHT, **options.pop("data", {})}, epochs, Flying(dies_at, waits, dies_of), **options)
    run.tokens = tokens
    return run


def test_every_token_says_which_weights_drew_it_while_they_came(tmp_path):
    run = flight(tmp_path / "one")
    # Rollout 0 is the first weights'; of each later one they drew two steps, and the next came then.
    assert run.tokens.rows[0] is None
    for number, rows_of_rollout in enumerate(run.tokens.rows[1:], start=1):
        for versions in rows_of_rollout:
            assert versions == [number - 1] * min(2, len(versions)) + [number] * (len(versions) - 2)
    for number, rollout in enumerate(run.tokens.rows[1:], start=1):
        old = [number - version for row in rollout for version in row]
        assert ages(run)[number] == pytest.approx(sum(old) / len(old))
    assert [context is None for context in run.tokens.seen] == [True] + [False] * 4
    assert 0 < float(rows(run)[2]["rollout/age"]) < 1
    assert float(rows(run)[2]["mismatch/staleness_kl"]) > 0
    # What is drawn depends on when the weights came, and on nothing else.
    assert torch.equal(flight(tmp_path / "two").weights, run.weights)


def test_rollouts_are_drawn_as_late_as_the_learner_need_not_wait():
    one, done = RolloutPrefetcher(3, "keep"), []
    one.pending = {5: PendingRollout(5, 4, 0, []), 6: PendingRollout(6, 4, 0, [])}
    for _ in range(3):  # it waits, however often
        one.adjust(5)
        done.append(one.depth)
    one.pending[5].completions = []
    one.adjust(5)
    done.append(one.depth)
    one.pending[6].completions = []
    for _ in range(3):  # two are there at a time
        one.adjust(5)
        done.append(one.depth)
    one.adjust(9)  # none is under way
    assert [*done, one.depth] == [2, 3, 3, 3, 2, 1, 1, 1]


def test_a_staleness_that_cannot_be_measured_is_left_out(tmp_path, monkeypatch):
    def gone(*args):
        raise RuntimeError("The engine holds no whole set of weights.")

    monkeypatch.setattr("lit_qrl.loop.schedule.moved_since", gone)
    for run in (flight(tmp_path / "flight", epochs=3), fit(tmp_path / "ahead", ONE_OFF, epochs=3)):
        assert [row.get("mismatch/staleness_kl") for row in rows(run)] == [None] * 3


def test_the_learner_does_not_wait_for_the_engine_to_score(tmp_path):
    engine, updated = Apart(), threading.Event()
    score = engine.score

    def late(sequences):
        if threading.current_thread() is not threading.main_thread():
            assert updated.wait(60)
        return score(sequences)

    class Updated(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.current_epoch:
                updated.set()

    engine.score = late
    run = fit(tmp_path, ONE_OFF, epochs=3, engine=engine, callbacks=[Updated()])
    assert all(float(row["mismatch/staleness_kl"]) > 0 for row in rows(run)[1:])
    assert ages(run)[1:] == [1, 1]


def test_a_run_with_updates_in_flight_goes_on(tmp_path):
    cut = flight(tmp_path / "cut", epochs=6, waits=False, callbacks=[StopAfter(3)])
    rest = flight(tmp_path / "rest", epochs=6, waits=False, ckpt_path=str(cut.folder / "checkpoints" / "last.ckpt"))
    assert max(ages(rest)) <= 2
    whole = cut.watch.prompts + rest.watch.prompts
    assert whole == fit(tmp_path / "on", {}, epochs=6).watch.prompts


@pytest.mark.parametrize("dies", [{"dies_at": [1]}, {"dies_at": [2]}, {"dies_at": [3, 4]}, {"dies_of": 2}], ids=str)
def test_what_an_engine_died_of_in_flight_is_drawn_again(tmp_path, dies):
    run = flight(tmp_path / "died", waits="dies_of" in dies, **dies)  # of a publish: everything under way
    assert run.watch.prompts == fit(tmp_path / "on", {}, epochs=5).watch.prompts
    deaths = [one for one in read_jsonl(run.folder / "events.jsonl") if one["kind"] == "engine_died"]
    assert len(deaths) == len(dies.get("dies_at", [2]))
    assert ("of a publish" in deaths[0]["message"]) == ("dies_of" in dies)
    assert max(ages(run)) <= 2


def test_a_publisher_that_publishes_less_often_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="when weights are published, and the publisher too"):
        fit(tmp_path, ONE_OFF, publisher={"every_n_iterations": 2})


def test_an_error_that_is_no_death_ends_the_run(tmp_path):
    class Wrong(Apart):
        def generate(self, *args, **kwargs):
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        fit(tmp_path, ONE_OFF, engine=Wrong())


def test_several_processes_draw_anew_what_one_had_drawn(tmp_path):
    _, _, data = build(tmp_path, engine=Apart(), data=THREE_OFF)
    saved = {"drafts": [{"iteration": 1, "start": 4, "completions": []}], "weights": {}}
    for processes, position, due in ((1, 9, {2, 3}), (2, 4, {1, 2, 3})):
        data.trainer = SimpleNamespace(world_size=processes)
        data.load_state_dict({"position": 9, "ahead": saved})
        assert data.position == position
        assert {number for number in range(1, 4) if data.schedule.due(number, number + 1)} == due


def test_only_new_weights_are_due():
    one = RolloutPrefetcher(3)
    one.pending = {number: PendingRollout(number, 0, 0, []) for number in range(5)}
    assert [one.due(number, 5) for number in range(5)] == [True, False, False, True, False]
    assert [one.due(number) for number in (2, 4, 5)] == [False, True, True]  # of a run without an end
