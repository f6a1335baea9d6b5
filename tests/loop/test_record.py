"""What a run writes down of where its weights met the engine."""

from types import SimpleNamespace

import torch

from lit_qrl.loop.drafts import Draft
from lit_qrl.loop.record import FlightRecord, digest, place_of, rollout_seed, settings_of
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.pauses import Stand
from lit_qrl.rollout.remote.engine import RemoteEngine
from lit_qrl.rollout.remote.wire import versions
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.types import Completion
from tests.tiny_run import build


def learner(folder, world_size=1):
    trainer = SimpleNamespace(current_epoch=2, world_size=world_size, default_root_dir=str(folder))
    return SimpleNamespace(trainer=trainer, data=SimpleNamespace(engine=SimpleNamespace(engines=2)))


def draft(*tokens, versions=None):
    one = Completion(token_ids=list(tokens), logprobs=[0.0] * len(tokens), finish_reason="stop", version=4)
    one.versions = versions
    return Draft(2, 1, 0, [], [one])


def test_a_line_names_rollouts_by_their_iterations(tmp_path):
    record = FlightRecord({"data.seed": 3})
    for number in range(4):
        record.name(rollout_seed(3, number), number)
    record.begin(learner(tmp_path), [2])
    record.stood("publish", [Stand(None, None), Stand(rollout_seed(3, 1), 5)])
    record.stood("score", [Stand(rollout_seed(3, 3), None)] * 2)
    record.write(learner(tmp_path), 1, draft(7, 8))
    record.died()
    record.write(learner(tmp_path), 2, draft(7, 8))
    tokens = digest(draft(7, 8))
    assert read_jsonl(tmp_path / "flight.jsonl") == [
        {"begins": 3, "kept": [3], "engines": 2, "versions": versions(), "settings": {"data.seed": 3}},
        {"iteration": 3, "ahead": 1, "publish": [[0, None], [2, 5]], "score": [[4, None]] * 2, "tokens": tokens},
        {"iteration": 3, "ahead": 2, "died": True, "tokens": tokens},
    ]


def test_the_sum_over_tokens_sees_tokens_and_versions():
    sums = [digest(one) for one in (draft(7, 8), draft(7, 9), draft(7, 8, versions=[4, 5]))]
    assert len(set(sums)) == 3
    assert digest(draft(7, 8, versions=[4, 4])) == sums[0]


def test_several_processes_write_none(tmp_path):
    FlightRecord({}).begin(learner(tmp_path, world_size=2), [])
    assert not (tmp_path / "flight.jsonl").exists()


def test_settings_say_what_is_learned_and_not_where_it_is_drawn(tmp_path):
    def settings(engine, **changes):
        trainer, module, data = build(tmp_path, engine=engine, **changes)
        trainer.datamodule, module._trainer = data, trainer
        return settings_of(module)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.25)

    first = settings(RemoteEngine(TransformersEngine(max_batch=3), devices=["cpu"]), optimizer=sgd)
    assert {
        key: first[key] for key in ("model.optimizer.lr", "data.engine.engine.max_batch", "trainer.max_epochs")
    } == {
        "model.optimizer.lr": 0.25,
        "data.engine.engine.max_batch": 3,
        "trainer.max_epochs": 2,
    }
    assert settings(RemoteEngine(TransformersEngine(max_batch=3), devices=["cpu", "cpu"]), optimizer=sgd) == first
    assert settings(RemoteEngine(TransformersEngine(max_batch=4), devices=["cpu"]), optimizer=sgd) != first
    assert place_of("data.engine.devices.0") == "data.engine.devices"
