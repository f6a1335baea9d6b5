"""Engines that die: one event, a new engine with verified weights, the same drawn again, and an end to it."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.callbacks import RLCallback
from lit_qrl.callbacks.publisher import WeightPublisher
from lit_qrl.errors import ConfigError, MemoryShortageError, StoppedError
from lit_qrl.receipts.ledger import Fault, PublishError
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.strategies import ColocatedStrategy
from tests.tiny_run import TellingEngine, Watch, build, fit, parameters_of


class MortalEngine(TellingEngine):
    """Dies at the given calls of `generate`, `load_weights` or `score`, counted over the whole run from 0."""

    def __init__(self, **deaths):
        super().__init__()
        self.deaths, self.calls = deaths, Counter()

    def asked(self, name):
        self.calls[name] += 1
        if self.calls[name] - 1 in self.deaths.get(name, ()):
            self.story.append("died")
            raise EngineDiedError("boom") from MemoryError("out of memory")
        super().asked(name)


def mortal(folder, deaths=None, epochs=3, publisher=None, **options):
    """Run with an engine of these deaths; return (module, engine, rollouts, run)."""
    rollouts, every = Watch(), options.pop("checkpoint_every", 1)
    trainer, module, data = build(
        folder,
        callbacks=[rollouts, *options.pop("callbacks", [])],
        publisher=publisher,
        trainer={"max_epochs": epochs, **options.pop("trainer", {})},
        **options,
    )
    trainer.checkpoint_callback.every_n_iterations = every
    data.engine = engine = MortalEngine(**(deaths or {}))

    def run(ckpt_path=None):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)

    return module, engine, rollouts, run


def events(folder, kind):
    return [event for event in read_jsonl(folder / "run" / "events.jsonl") if event["kind"] == kind]


@pytest.fixture(scope="module")
def immortal(tmp_path_factory):
    """Return the weights and rollouts of a run whose engine lives."""
    module, _, rollouts, run = mortal(tmp_path_factory.mktemp("immortal"))
    run()
    return parameters_of(module), rollouts


@pytest.mark.parametrize("deaths", [{"generate": [1]}, {"load_weights": [1]}, {"generate": [1, 2]}], ids=str)
def test_a_death_costs_no_more_than_its_time(tmp_path, deaths, immortal):
    module, engine, rollouts, run = mortal(tmp_path, deaths)
    run()
    weights, expected = immortal
    assert torch.equal(parameters_of(module), weights)
    assert all(torch.equal(a, b) for a, b in zip(rollouts.tokens, expected.tokens, strict=True))
    assert rollouts.versions == expected.versions == [0, 1, 2]
    count = len(next(iter(deaths.values())))
    logged = events(tmp_path, "engine_died")
    assert [event["restart"] for event in logged] == list(range(1, count + 1))
    assert {event["iteration"] for event in logged} == {2}
    assert "boom" in logged[0]["message"]
    assert engine.story.count("setup") == 1 + count


@pytest.mark.parametrize(
    ("deaths", "before"),
    [({"generate": [1]}, ["setup", "load_weights", "score", "generate"]), ({"score": [0]}, ["setup"])],
    ids=str,
)
def test_the_new_engine_is_published_to_and_probed_before_it_draws(tmp_path, deaths, before):
    _, engine, rollouts, run = mortal(tmp_path, deaths)
    run()
    reborn = ["load_weights", "died", "close", "setup", "load_weights", "score", "generate"]
    after = ["load_weights", "generate"] * (2 if before == ["setup"] else 1)
    assert engine.story == [*before, *reborn, *after, "close"]
    assert rollouts.versions == [0, 1, 2]


def test_a_death_during_an_evaluation(tmp_path):
    module, engine, _, run = mortal(tmp_path / "a", {"generate": [0, 4]}, trainer={"limit_val_batches": 1})
    run()
    plain, _, _, run = mortal(tmp_path / "b", trainer={"limit_val_batches": 1})
    run()
    assert engine.story.count("died") == 2
    assert module.trainer.callback_metrics["val/accuracy"] == plain.trainer.callback_metrics["val/accuracy"]
    assert torch.equal(parameters_of(module), parameters_of(plain))


def test_deaths_are_counted_in_a_row(tmp_path):
    _, _, rollouts, run = mortal(tmp_path, {"generate": [0, 2, 4]}, publisher={"max_restarts": 1})
    run()
    assert rollouts.versions == [0, 1, 2]
    assert [event["restart"] for event in events(tmp_path, "engine_died")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("together", "restarts", "why"), [(True, 2, "it was one with those of other processes"), (False, 0, "0 restarts")]
)
def test_no_part_of_an_engine_is_built_again_alone_and_none_where_none_is_wanted(tmp_path, together, restarts, why):
    _, engine, before, run = mortal(tmp_path, {"generate": [1]}, publisher={"max_restarts": restarts})
    engine.draws_together = together
    with pytest.raises(StoppedError, match=rf"boom \({why}"):
        run()
    assert before.versions == [0]
    assert engine.story.count("setup") == 1


@pytest.mark.parametrize("every", [1, 3])
def test_after_the_last_restart_the_run_stops_and_goes_on_from_its_checkpoint(tmp_path, every, capsys, quick_plots):
    folder = tmp_path / "mortal"
    _, engine, before, run = mortal(folder, {"generate": [2, 3, 4]}, 4, report=True, checkpoint_every=every)
    with pytest.raises(StoppedError, match=r"boom \(2 restarts did not help\).*checkpoint is .*last\.ckpt") as caught:
        run()
    assert isinstance(caught.value.__cause__, EngineDiedError)
    assert len(events(folder, "engine_died")) == 3
    assert len(events(folder, "stopped")) == 1
    assert (folder / "run" / "report" / "index.html").exists()
    assert "Report: " in capsys.readouterr().out
    assert engine.story[-1] == "close"
    again, _, after, run = mortal(folder, epochs=4)
    run(str(folder / "run" / "checkpoints" / "last.ckpt"))
    plain, _, expected, run = mortal(tmp_path / "immortal", epochs=4)
    run()
    tokens = [*before.tokens, *after.tokens]
    assert all(torch.equal(a, b) for a, b in zip(tokens, expected.tokens, strict=True))
    assert torch.equal(parameters_of(again), parameters_of(plain))


def test_a_sampler_that_was_kept_cannot_be_had_back_and_gets_a_new_version(tmp_path):
    _, _, rollouts, run = mortal(tmp_path, {"generate": [1]}, 4, publisher={"every_n_iterations": 2})
    run()
    assert rollouts.versions == [0, 1, 2, 2]


def test_a_restart_starts_the_noise_anew(tmp_path):
    from lit_qrl.callbacks import AQNNoise

    seen = []
    for name, deaths in (("a", {"generate": [1]}), ("b", {})):
        noise = AQNNoise(start=0.3, end=0.1, num_stages=2)
        module, _, rollouts, run = mortal(tmp_path / name, deaths, callbacks=[noise])
        run()
        seen.append((parameters_of(module), torch.cat([tokens.flatten() for tokens in rollouts.tokens])))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_hang_leaves_a_diary_and_a_report(tmp_path, quick_plots):
    trainer, module, data = build(tmp_path, report=True, trainer={"max_epochs": 1})

    class Hangs(RLCallback):
        def on_rollout_end(self, trainer, module, batch):
            module.data.engine.spec.on_hang("The engine hangs.")

    trainer.callbacks.insert(0, Hangs())
    trainer.fit(module, datamodule=data)
    assert [event["message"] for event in events(tmp_path, "engine_hung")] == ["The engine hangs."]
    assert (tmp_path / "run" / "report" / "index.html").exists()


def repeat(folder, *errors, retries=0):
    """Publish where each attempt raises one of these, until none is left; return the attempts and what followed."""
    left, story = list(errors), []
    publisher = WeightPublisher(on_fault="retry" if retries else "stop")
    trainer = SimpleNamespace(default_root_dir=str(folder), is_global_zero=True, current_epoch=0)
    publisher.learner = SimpleNamespace(trainer=trainer)
    publisher._connection = SimpleNamespace(forget=lambda: story.append("forgot"))
    publisher._bury = lambda error: story.append("buried")

    def once(what):
        story.append("tried")
        if left:
            raise left.pop(0)

    publisher._once = once
    publisher._publish("evaluation")
    return story


def test_a_publish_is_repeated_to_a_new_engine_and_after_a_fault_where_asked(tmp_path):
    died, fault = EngineDiedError("boom"), PublishError([Fault("missing", "a")], 0)
    assert repeat(tmp_path, died, died) == ["tried", "buried", "tried", "buried", "tried"]
    assert repeat(tmp_path, died, fault, retries=1) == ["tried", "buried", "tried", "forgot", "tried"]
    for error in (fault, ValueError("of an engine")):
        with pytest.raises(type(error)) as caught:
            repeat(tmp_path, error, error, retries=1)
        assert caught.value is error
    with pytest.raises(ConfigError):  # a mistake of the user's is none of the wire
        repeat(tmp_path, ConfigError("no"), retries=1)
    logged = [event["faults"] for event in read_jsonl(tmp_path / "events.jsonl")]
    assert logged == [["missing"], ["missing"], ["missing"], [], []]


class Sleeper(TellingEngine):
    """An engine that sleeps, and fails to at the given times."""

    sleep_level, holds_weights = 1, True

    def __init__(self, error, fails=(), wakes_fail=()):
        super().__init__()
        self.error, self.fails, self.wakes_fail = error, fails, wakes_fail

    def sleep(self):
        if self._modules is not None:  # else it is closed
            self.asked("sleep")
            if self.story.count("sleep") - 1 in self.fails:
                raise self.error

    def wake(self):
        self.asked("wake")
        if self.story.count("wake") - 1 in self.wakes_fail:
            raise EngineDiedError("vLLM did not wake")


NO_SLEEP = EngineDiedError("vLLM did not sleep")


def slept(folder, engine, epochs=4, **options):
    """Run with an engine that takes turns with the learner; return the weights and the versions of the rollouts."""
    trainer = {"max_epochs": epochs, "strategy": ColocatedStrategy()}
    _, module, _ = fit(folder, engine=engine, callbacks=[rollouts := Watch()], trainer=trainer, **options)
    return parameters_of(module), rollouts.versions


def test_an_engine_that_does_not_fall_asleep_is_built_again(tmp_path):
    well, ill = Sleeper(NO_SLEEP), Sleeper(NO_SLEEP, [1])
    (weights, versions), (others, same) = slept(tmp_path / "well", well), slept(tmp_path / "ill", ill)
    assert versions == same == [0, 1, 2, 3]
    assert (well.story.count("close"), ill.story.count("close")) == (1, 2)
    assert torch.equal(weights, others)


def test_an_engine_that_never_falls_asleep_ends_the_run(tmp_path):
    engine = Sleeper(NO_SLEEP, range(99))
    with pytest.raises(StoppedError, match=r"did not sleep \(2 restarts did not help\)"):
        slept(tmp_path, engine, 9)
    assert engine.story.count("sleep") < 9


def test_memory_that_runs_out_in_a_sleep_ends_the_run(tmp_path):
    engine = Sleeper(MemoryShortageError("Memory ran out while the engine fell asleep: much. Less."), [1])
    with pytest.raises(StoppedError, match=r"fell asleep: much\. Less\..*last\.ckpt"):
        slept(tmp_path, engine)


def test_an_engine_that_dies_waking_without_a_publish_is_built_again(tmp_path):
    engine = Sleeper(NO_SLEEP, wakes_fail=[1])
    _, versions = slept(tmp_path, engine, publisher={"every_n_iterations": 2})
    assert versions == [0, 1, 2, 2]  # the weights of the first cannot be had back
    assert engine.story.count("close") == 2
