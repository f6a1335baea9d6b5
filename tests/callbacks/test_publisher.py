"""What the callback adds to publish/: the user's arguments, and a state that survives a checkpoint."""

import torch

from lit_qrl.callbacks.publisher import WeightPublisher
from tests.tiny_run import calling, fit


def test_numbering_and_bound_survive_a_checkpoint(tmp_path):
    trainer, _, _ = fit(tmp_path, trainer={"max_epochs": 2})
    (callback,) = [callback for callback in trainer.callbacks if isinstance(callback, WeightPublisher)]
    state = callback.state_dict()
    fresh = WeightPublisher()
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state == {"version": 1, "probe": callback.baseline}
    assert state["probe"] > 0
    fresh.load_state_dict({"version": 7})  # of before the probe had a bound
    assert fresh.state_dict() == {"version": 7, "probe": None}
    versions, path = [], tmp_path / "run/checkpoints/last.ckpt"
    assert torch.load(path, weights_only=True)["callbacks"]["WeightPublisher"] == state
    watch = calling(on_rollout_end=lambda trainer, module, batch: versions.append({*batch.version.tolist()}))
    fit(tmp_path, callbacks=[watch], ckpt_path=str(path), trainer={"max_epochs": 4})
    assert versions == [{2}, {3}]
