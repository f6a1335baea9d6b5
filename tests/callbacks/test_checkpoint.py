import pytest
import torch

from lit_qrl.callbacks import AIS, AQNNoise
from lit_qrl.callbacks.checkpoint import resolve_checkpoint
from lit_qrl.errors import ConfigError
from lit_qrl.run.folder import last_checkpoint
from tests.tiny_run import build, fit, parameters_of


@pytest.mark.parametrize("callbacks", [[AIS], [lambda: AQNNoise(num_stages=2)]], ids=["ais", "aqn"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, callbacks):
    def fresh():
        return [make() for make in callbacks]

    _, whole, _ = fit(tmp_path / "whole", callbacks=fresh(), trainer={"max_epochs": 4})
    fit(tmp_path / "cut", callbacks=fresh(), trainer={"max_epochs": 4, "limit_train_batches": 1.0, "max_steps": 2})
    saved = last_checkpoint(tmp_path / "cut" / "run")
    assert saved is not None
    trainer, resumed, data = build(tmp_path / "cut", callbacks=fresh(), trainer={"max_epochs": 4})
    trainer.fit(resumed, datamodule=data, ckpt_path=saved, weights_only=True)
    assert trainer.current_epoch == 4
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


def test_nothing_is_left_beside_the_checkpoint_and_copies_are_numbered(tmp_path):
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 2})
    checkpoint = next(c for c in trainer.callbacks if type(c).__name__ == "RunCheckpoint")
    checkpoint.keep_every = 2
    trainer.fit(module, datamodule=data)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["iteration-2.ckpt", "last.ckpt"]


def test_resolve_last_and_missing(tmp_path):
    assert resolve_checkpoint(None, tmp_path, False) is None
    assert resolve_checkpoint(None, tmp_path, True) is None
    with pytest.raises(ConfigError, match="no checkpoint to resume"):
        resolve_checkpoint("last", tmp_path, False)
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_checkpoint(str(tmp_path / "other.ckpt"), tmp_path, False)
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        resolve_checkpoint(str(broken), tmp_path, False)


def test_an_unwritable_folder_is_refused_before_training(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    trainer, module, data = build(tmp_path, trainer={"logger": False})
    with pytest.raises(ConfigError, match="cannot be written"):
        trainer.fit(module, datamodule=data)
