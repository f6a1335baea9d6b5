"""A run whose weights came in flight is followed by another: the same tokens, versions, metrics and weights."""

import csv
import json
import shutil
from concurrent.futures import wait
from contextlib import ExitStack
from threading import Semaphore
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lit_qrl.callbacks import RunCheckpoint, TruncatedIS
from lit_qrl.errors import ConfigError, StoppedError
from lit_qrl.loop.ahead import Ahead
from lit_qrl.loop.record import rollout_seed
from lit_qrl.loop.replay import Replay
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.pauses import Stand
from lit_qrl.rollout.remote.engine import RemoteEngine
from lit_qrl.rollout.remote.server import Session
from lit_qrl.rollout.remote.wire import versions
from lit_qrl.run.event_log import append_jsonl, read_jsonl
from lit_qrl.run.loggers import RunCSVLogger
from tests.loop.test_ahead import StopAfter, Tokens, Watch
from tests.rollout.remote.served import TOKEN, Mortal, server
from tests.tiny_run import build, parameters_of

PATIENCE = 60.0
TIMES = ("time/", "publish/gigabytes_per_second", "rollout/tokens_per_second", "rollout/seconds_ahead")
SIZES = {"schedule": "async", "max_staleness": 2, "in_flight_updates": "keep", "max_completion_tokens": 12}
WAITS = {2: [(2, 1), (4, 2)], 4: [(0, 3)]}
"""Of each draw: the steps after which it waits, until the engine has a version. The second takes weights twice."""
MORTAL = "tests.rollout.remote.served.Mortal"


class Waits(Callback):
    """Lets draws wait for weights, in servers of this process, and the learner publish them then; two drawn ahead."""

    def __init__(self, monkeypatch, engines=1, waits=WAITS):
        self.engines, self.draws = engines, {}
        self.reached = {version: Semaphore(0) for told in waits.values() for _, version in told}
        between = Session._between_steps

        def held(session):
            if session._steps == 0:
                self.draws[session] = self.draws.get(session, -1) + 1
            for step, version in waits.get(self.draws.get(session), ()):
                if session._steps == step and session.engine.version < version:
                    self.reached[version].release()
                    while session.engine.version < version:
                        assert session.connection.poll(PATIENCE)
                        session._serve(*session._receive())
            between(session)

        monkeypatch.setattr(Session, "_between_steps", held)
        monkeypatch.setattr(Ahead, "adjust", lambda ahead, now: setattr(ahead, "depth", 2))

    def on_train_epoch_end(self, trainer, pl_module):
        for _ in range(self.engines if trainer.current_epoch + 1 in self.reached else 0):
            assert self.reached[trainer.current_epoch + 1].acquire(timeout=PATIENCE)
        if trainer.current_epoch == 4:  # the next publish finds an engine that has drawn all
            wait(pl_module.data.ahead._futures.values(), PATIENCE)


def fly(run, data=None, engines=1, epochs=6, callbacks=(), ckpt_path=None, engine=None, **options):
    """Make a run whose engines are in servers of this process."""
    watch, tokens, folder = Watch(), Tokens(), run.parent
    (folder / "token").write_text(TOKEN.decode())
    with ExitStack() as stack:
        places = [stack.enter_context(server()) for _ in range(engines)]
        held = RemoteEngine(engine or TransformersEngine(), hosts=places, token_file=str(folder / "token"))
        place = {"max_epochs": epochs, "default_root_dir": str(run), "logger": RunCSVLogger(run)}
        options["trainer"] = {**place, **options.get("trainer", {})}
        trainer, module, module_data = build(
            folder,
            engine=held,
            data={**SIZES, **(data or {})},
            callbacks=[watch, tokens, TruncatedIS(), *callbacks],
            **options,
        )
        (checkpoint,) = [one for one in trainer.callbacks if isinstance(one, RunCheckpoint)]
        checkpoint.every_n_iterations = 0
        trainer.fit(module, datamodule=module_data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return SimpleNamespace(
        watch=watch, versions=tokens.rows, weights=parameters_of(module), folder=run, ages=module_data.ahead
    )


def metrics(run, begin=0):
    with (run.folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("publish/version")]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows[begin:]]


def lines(run):
    return [{**one, "settings": None} for one in read_jsonl(run.folder / "flight.jsonl")]


def events(run):
    return [one["message"] for one in read_jsonl(run.folder / "events.jsonl") if one["kind"].startswith("replay")]


def assert_same(one, other):
    assert torch.equal(one.weights, other.weights)
    assert one.versions == other.versions
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one.watch.tokens, other.watch.tokens, strict=True))
    assert metrics(one) == metrics(other)
    assert lines(one) == lines(other)


@pytest.mark.parametrize(
    ("data", "engine", "engines"),
    [
        ({}, {}, 1),
        ({"in_flight_updates": "recompute"}, {}, 1),
        ({"in_flight_updates": "recompute"}, {"cuda_graphs": True, "max_batch": 6}, 1),
        ({}, {"cuda_graphs": True, "max_batch": 3}, 2),
    ],
    ids=["keep", "recompute", "slots", "two engines"],
)
def test_a_replay_is_the_run_that_it_follows(tmp_path, monkeypatch, data, engine, engines):
    with monkeypatch.context() as patch:
        waits = Waits(patch, engines)
        first = fly(tmp_path / "first", data, engines, callbacks=[waits], engine=TransformersEngine(**engine))
    drawn = [{version for row in rows for version in row} for rows in first.versions if rows is not None]
    assert {0, 1, 2} in drawn  # twice within one draw
    assert any(steps is None for row in lines(first) for _, steps in row.get("publish", []))  # and to an idle engine
    data = {**data, "replay": str(first.folder)}
    again = fly(tmp_path / "again", data, engines, engine=TransformersEngine(**engine))
    assert_same(first, again)
    (told,) = events(again)
    assert "6 iterations." in told


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A run of four iterations, whose record tests change."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PL_GLOBAL_SEED", raising=False)
        run = fly(tmp_path_factory.mktemp("followed") / "first", epochs=4)
    lines = read_jsonl(run.folder / "flight.jsonl")

    def changed(name, change):
        copy = [json.loads(json.dumps(one)) for one in lines]
        change(copy)
        (run.folder.parent / name).mkdir()
        append_jsonl(run.folder.parent / name / "flight.jsonl", copy)
        return str(run.folder.parent / name)

    return SimpleNamespace(run=run, changed=changed)


def test_a_run_that_was_cut_and_went_on_is_followed_in_one(tmp_path, monkeypatch):
    run, last = tmp_path / "first", tmp_path / "first" / "checkpoints" / "last.ckpt"
    with monkeypatch.context() as patch:
        cut = fly(run, callbacks=[Waits(patch), StopAfter(3)])
    copy = shutil.copy(last, tmp_path / "copy.ckpt")
    rest = fly(run, ckpt_path=copy)
    begins = [one for one in lines(rest) if "begins" in one]
    assert [(one["begins"], one["kept"]) for one in begins] == [(1, []), (4, [4])]  # the fifth was under way
    again = fly(tmp_path / "again", data={"replay": str(run)})
    assert torch.equal(again.weights, rest.weights)
    assert again.versions == cut.versions + rest.versions
    assert metrics(again) == metrics(rest)
    assert lines(again) == lines(rest)
    half = fly(tmp_path / "half", data={"replay": str(run)}, ckpt_path=copy)
    assert torch.equal(half.weights, rest.weights)
    assert half.versions == rest.versions


def test_a_run_that_was_cut_is_followed_as_far_as_it_came(tmp_path, followed):
    folder = followed.changed("cut", lambda told: told.pop())
    short = fly(followed.run.folder.parent / "short", {"replay": folder}, epochs=4)
    assert metrics(short) == metrics(followed.run)[:3]
    assert "3 iterations, after which it was cut" in events(short)[0]


def test_a_death_is_recorded_and_a_replay_ends_before_it(tmp_path, followed):
    Mortal.switch = True
    died = fly(tmp_path / "died", epochs=2, engine=Mortal())
    assert [one.get("died") for one in lines(died)] == [None, True, None]
    with pytest.raises(ConfigError, match=r"no iteration that can be followed.*an engine died in its first"):
        Replay(str(died.folder)).check(read_jsonl(died.folder / "flight.jsonl")[0]["settings"], 1)
    folder = followed.changed("died", lambda told: told[3].update(died=True))
    short = fly(followed.run.folder.parent / "before", {"replay": folder}, epochs=4)
    assert len(metrics(short)) == 2
    assert "2 iterations, after which its engine died" in events(short)[0]


def test_an_engine_that_dies_of_a_replay_ends_it(followed):
    folder = followed.changed("dies", lambda told: told[0]["settings"].update({"data.engine.engine": MORTAL}))
    Mortal.switch = True
    with pytest.raises(StoppedError, match="An engine died of what is replayed"):
        fly(followed.run.folder.parent / "dying", {"replay": folder}, epochs=4, engine=Mortal())


def test_a_rollout_that_ends_too_early_ends_the_replay(followed):
    folder = followed.changed("early", lambda told: told[3].update(publish=[[3, 99]]))
    with pytest.raises(StoppedError, match="weights came after step 99 of a rollout there, which ended before"):
        fly(followed.run.folder.parent / "astray", {"replay": folder}, epochs=4)


def test_other_tokens_are_told_of_once(followed):
    folder = followed.changed("others", lambda told: [one.update(tokens="") for one in told[2:]])
    run = fly(followed.run.folder.parent / "told", {"replay": folder}, epochs=4)
    assert metrics(run) == metrics(followed.run)
    (_, told) = events(run)
    assert "the tokens of iteration 2 are others" in told


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": {"group_size": 2}}, "other settings.* data.group_size 4 there and 2 here"),
        ({"data": {"seed": 1}}, "other settings.* data.seed 0 there and 1 here"),
        ({"epochs": 9}, "other settings.* trainer.max_epochs 4 there and 9 here"),
        ({"data": {"max_staleness": 1}}, "data.max_staleness 2 there and 1 here"),
        ({"lr": 0.5}, "model.optimizer.lr 0.003 there and 0.5 here"),
        ({"publisher": {"probe_every": 7}}, "trainer.callbacks.WeightPublisher.probe_every"),
        ({"trainer": {"gradient_clip_val": 1.0}}, "trainer.gradient_clip_val nothing there and 1.0 here"),
        ({"engines": 2}, "another number of engines.* 1 there and 2 here"),
    ],
)
def test_a_record_of_another_run_is_refused(followed, change, named):
    change = {"epochs": 4, **change, "data": {**change.get("data", {}), "replay": str(followed.run.folder)}}
    with pytest.raises(ConfigError, match=f"data.replay: the record of .* does not fit this run.*{named}"):
        fly(followed.run.folder.parent / "refused", **change)


def test_another_global_seed_is_refused(followed, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    with pytest.raises(ConfigError, match="seed_everything 0 there and 3 here"):
        fly(followed.run.folder.parent / "refused", {"replay": str(followed.run.folder)}, epochs=4)


def test_other_versions_are_refused(followed):
    folder = followed.changed("old", lambda told: told[0]["versions"].update(torch="1.0"))
    with pytest.raises(ConfigError, match=rf"other versions.*torch 1\.0 there and {versions()['torch'][0]}"):
        Replay(folder).check(read_jsonl(followed.run.folder / "flight.jsonl")[0]["settings"], 1)


def test_several_processes_are_refused(followed):
    with pytest.raises(ConfigError, match=r"data\.replay follows a run of one process"):
        Replay(str(followed.run.folder)).check({}, 2)


@pytest.mark.parametrize(
    ("iteration", "restored", "named"),
    [
        (4, [], "fewer iterations.* 4 there"),
        (0, [1], "1 with no rollout there, and before 1 with those of 2"),
        (2, [], "before 3 with no"),
    ],
)
def test_a_checkpoint_that_the_other_run_did_not_go_on_from_is_refused(followed, iteration, restored, named):
    with pytest.raises(ConfigError, match=named):
        Replay(str(followed.run.folder)).begin(iteration, restored)


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.replay names a folder without the record .*flight\.jsonl"):
        Replay(str(tmp_path))


def test_each_engine_stands_still_where_its_own_did(followed):
    folder = followed.changed("two", two)
    courses = Replay(folder).courses(0, 5)
    assert courses[0][:2] == [Stand(rollout_seed(5, 1), 3), Stand(rollout_seed(5, 2), 0)]
    assert courses[1][:2] == [Stand(None, None), Stand(rollout_seed(5, 1), None)]


def two(told):
    told[0]["engines"] = 2
    told[2:] = [{**told[2], "publish": [[2, 3], [0, None]], "score": [[3, 0], [2, None]]}]
