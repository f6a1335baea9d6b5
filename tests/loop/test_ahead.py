"""Rollouts drawn while the learner updates: which weights draw what, in any order of events."""

import csv
import threading
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lit_qrl.callbacks import TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.loop import ahead
from lit_qrl.loop.ahead import Ahead, check_ahead, packed, staleness_of, tell_ages, unpacked
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.objective import GRPO
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.diary import read_jsonl
from lit_qrl.types import Completion
from tests.loop.test_turns import Echo
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
    with (run.folder / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("publish/version") or row.get("rollout/age")]


@pytest.mark.parametrize(
    ("schedule", "versions", "ages"),
    [
        (ONE_OFF, [0, 0, 1, 2, 3, 4, 5], {0: 1, 1: 6}),
        (THREE_OFF, [0, 0, 0, 0, 1, 1, 1], {0: 1, 1: 2, 2: 2, 3: 2}),
    ],
)
def test_every_rollout_is_drawn_by_the_weights_that_the_schedule_says(tmp_path, schedule, versions, ages):
    on_policy = fit(tmp_path / "on", {})
    run = fit(tmp_path / "ahead", schedule)
    assert run.watch.versions == [[version] for version in versions]
    assert run.watch.prompts == on_policy.watch.prompts
    assert torch.equal(run.watch.tokens[0], on_policy.watch.tokens[0])  # the same weights and seeds
    assert [float(row["rollout/age"]) for row in rows(run)] == [i - run_at(i, schedule) for i in range(7)]
    assert {age: count > 0 for age, count in run.data.ahead.tokens_of_age.items()} == dict.fromkeys(ages, True)
    assert run.data.engine.threads == {"ahead_0"}


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
    assert rest.data.ahead.tokens_of_age == whole.data.ahead.tokens_of_age


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
    assert max(run.data.ahead.tokens_of_age) <= 3
    deaths = [one for one in read_jsonl(run.folder / "events.jsonl") if one["kind"] == "engine_died"]
    assert len(deaths) == len(dies_at)
    if dies_at == [1]:  # nothing was learned yet, so the weights are the same
        assert torch.equal(run.weights, whole.weights)


def test_evaluations_wait_for_what_is_drawn_and_change_nothing(tmp_path):
    plain = fit(tmp_path / "plain", THREE_OFF)
    often = fit(tmp_path / "often", THREE_OFF, trainer={"limit_val_batches": 1})
    assert torch.equal(plain.weights, often.weights)


def test_the_end_says_how_old_the_weights_were(tmp_path):
    run = fit(tmp_path, ONE_OFF, epochs=3)
    (event,) = [one for one in read_jsonl(run.folder / "events.jsonl") if one["kind"] == "ages"]
    counts = run.data.ahead.tokens_of_age
    assert event["tokens"] == {str(age): count for age, count in counts.items()}
    assert f"{counts[1] / sum(counts.values()):.1%} 1" in event["message"]
    in_turns = SimpleNamespace(data=SimpleNamespace(ahead=None))
    assert tell_ages(in_turns) == ""


@pytest.mark.parametrize(("schedule", "staleness"), [("later", 1), ("async", 0), ("on_policy", 2), ("one_step_off", 2)])
def test_a_schedule_that_does_not_exist_is_refused(schedule, staleness):
    with pytest.raises(ConfigError, match=r"data\.(schedule|max_staleness)"):
        staleness_of(schedule, staleness)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine": TransformersEngine()}, "TransformersEngine, which shares the learner's memory"),
        ({"objective": GRPO(filter_zero_variance=True)}, "filter_zero_variance"),
        ({"denoises": True}, "estimates log-probs again"),
        ({"task": Echo()}, "data.task: Echo, whose environments answer"),
    ],
)
def test_what_cannot_be_drawn_meanwhile_is_refused(changes, named):
    learner = SimpleNamespace(
        data=SimpleNamespace(engine=changes.get("engine", Apart()), task=changes.get("task")),
        objective=changes.get("objective", GRPO()),
        policy=SimpleNamespace(denoises=changes.get("denoises", False)),
    )
    with pytest.raises(ConfigError, match=named):
        check_ahead(learner, "one_step_off")


def test_a_publisher_that_publishes_less_often_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="when weights are published, and the publisher too"):
        fit(tmp_path, ONE_OFF, publisher={"every_n_iterations": 2})


def test_an_error_that_is_no_death_ends_the_run(tmp_path):
    class Wrong(Apart):
        def generate(self, *args, **kwargs):
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        fit(tmp_path, ONE_OFF, engine=Wrong())


def test_completions_are_packed_and_unpacked():
    completions = [
        Completion(token_ids=[], logprobs=[], finish_reason="length", version=2),
        Completion(token_ids=[5], logprobs=[-0.1], finish_reason="stop", version=3),
        Completion(token_ids=[1, 2], logprobs=[-1 / 3, -2.0], finish_reason="length", version=3),
    ]
    assert unpacked(packed(completions)) == completions
    routed = [
        Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", version=0, routed_experts=torch.ones(2, 1))
    ]
    assert torch.equal(unpacked(packed(routed))[0].routed_experts, torch.ones(2, 1))


def test_only_new_weights_are_due():
    one = Ahead(3)
    one.drafts = {number: ahead.Draft(number, 0, 0, []) for number in range(5)}
    assert [one.due(number) for number in range(6)] == [True, False, False, True, False, True]
