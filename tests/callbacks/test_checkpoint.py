import os
import signal
import threading

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.connectors import signal_connector
from peft import LoraConfig

from lit_qrl.callbacks import AIS, AQNNoise, RLCallback
from lit_qrl.callbacks.checkpoint import resolve_checkpoint
from lit_qrl.errors import ConfigError
from lit_qrl.run import checkpoint_files as saving
from lit_qrl.run.checkpoint_files import CheckpointFiles
from lit_qrl.run.folder import last_checkpoint
from lit_qrl.run.interrupt import Interrupted
from tests.tiny_run import build, fit, model_folder, parameters_of


@pytest.mark.parametrize("callbacks", [[AIS], [lambda: AQNNoise(num_stages=2)]], ids=["ais", "aqn"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, callbacks):
    def fresh():
        return [make() for make in callbacks]

    _, whole, _ = fit(tmp_path / "whole", callbacks=fresh(), trainer={"max_epochs": 4})
    fit(tmp_path / "cut", callbacks=fresh(), trainer={"max_epochs": 4, "limit_train_batches": 1.0, "max_steps": 2})
    saved = last_checkpoint(tmp_path / "cut" / "run")
    assert saved is not None
    trainer, resumed, _ = fit(tmp_path / "cut", callbacks=fresh(), ckpt_path=saved, trainer={"max_epochs": 4})
    assert trainer.current_epoch == 4
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


def test_nothing_is_left_beside_the_checkpoint_and_copies_are_numbered(tmp_path):
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 2})
    trainer.checkpoint_callback.keep_every = 2
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
    with pytest.raises(ConfigError, match="was never a checkpoint"):
        resolve_checkpoint(str(broken), tmp_path, False)


def test_an_unwritable_folder_is_refused_before_training(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    trainer, module, data = build(tmp_path, trainer={"logger": False})
    with pytest.raises(ConfigError, match="cannot be written"):
        trainer.fit(module, datamodule=data)


def lora():
    return {"lora": LoraConfig(r=4, target_modules="all-linear")}


def test_an_adapter_s_run_saves_no_base_and_resumes_with_the_same_bits(tmp_path):
    _, whole, _ = fit(tmp_path / "whole", policy=lora(), trainer={"max_epochs": 3})
    fit(tmp_path / "cut", policy=lora(), trainer={"max_epochs": 3, "max_steps": 2})
    saved = last_checkpoint(tmp_path / "cut" / "run")
    held = torch.load(saved, weights_only=True)
    assert all("lora_" in name for name in held["state_dict"] if name.startswith("policy."))
    assert any(name.endswith("base_layer.weight") for name in held["policy"]["frozen"]["names"])
    _, resumed, _ = fit(tmp_path / "cut", policy=lora(), ckpt_path=saved, trainer={"max_epochs": 3})
    assert torch.equal(parameters_of(resumed), parameters_of(whole))
    model_folder(tmp_path / "other" / "model", seed=5)
    trainer, other, data = build(tmp_path / "other", policy=lora(), trainer={"max_epochs": 3})
    with pytest.raises(ConfigError, match="another base"):
        trainer.fit(other, datamodule=data, ckpt_path=saved, weights_only=True)
    torch.save({**held, "more": tmp_path}, saved)
    with pytest.raises(ConfigError, match=r"it holds pathlib\.PosixPath, which is code and no data"):
        trainer.fit(other, datamodule=data, ckpt_path=saved, weights_only=False)


SLURM = {"JOB_ID": "7", "JOB_NAME": "run", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_updates_with_a_checkpoint_to_go_on_from(number, tmp_path, monkeypatch):
    class Signalled(RLCallback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.current_epoch == 1 and batch_idx == 0:
                os.kill(os.getpid(), number)

    _, whole, _ = fit(tmp_path / "whole", data={"mini_batches": 2}, trainer={"max_epochs": 4})
    before = signal.getsignal(signal.SIGTERM)
    options = {"data": {"mini_batches": 2}, "trainer": {"max_epochs": 4}}
    if number == signal.SIGUSR1:  # at which Lightning saves in the middle of the updates, and queues the job again
        for name, value in SLURM.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        options["trainer"]["plugins"] = [SLURMEnvironment()]
        monkeypatch.setattr(signal_connector, "call", lambda command: pytest.fail(str(command)))
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "cut", callbacks=[Signalled()], **options)
    assert isinstance(ended.value.__context__, Interrupted)
    assert signal.getsignal(signal.SIGTERM) is before
    saved = last_checkpoint(tmp_path / "cut" / "run")
    assert torch.load(saved, weights_only=True)["global_step"] == 4  # both updates of the second iteration
    assert not list((tmp_path / "cut" / "run").glob("hpc*"))
    _, resumed, _ = fit(tmp_path / "cut", ckpt_path=saved, **options)
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


@pytest.mark.parametrize("place", ["on_publish", "on_rollout_end"])
def test_a_run_that_stops_before_an_update_keeps_the_iterations_before(tmp_path, place):
    class Signalled(RLCallback):
        def on_publish(self, trainer, module, name, tensor):
            self.send(trainer, "on_publish")
            return tensor

        def on_rollout_end(self, trainer, module, batch):
            self.send(trainer, "on_rollout_end")

        def send(self, trainer, where):
            if trainer.current_epoch == 2 and where == place:
                os.kill(os.getpid(), signal.SIGTERM)

    options = {"data": {"mini_batches": 2}, "trainer": {"max_epochs": 4}}
    _, whole, _ = fit(tmp_path / "whole", **options)
    trainer, module, data = build(tmp_path / "cut", callbacks=[Signalled()], **options)
    trainer.checkpoint_callback.every_n_iterations = 0
    with pytest.raises(SystemExit):
        trainer.fit(module, datamodule=data)
    saved = last_checkpoint(tmp_path / "cut" / "run")
    assert torch.load(saved, weights_only=True)["global_step"] == 4  # both updates of two iterations
    trainer, resumed, _ = fit(tmp_path / "cut", ckpt_path=saved, **options)
    assert trainer.current_epoch == 4
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


@pytest.mark.parametrize(("every", "saves"), [("auto", None), (0, 1), (1, 3), (2, 2)])
def test_how_often_it_saves(tmp_path, monkeypatch, every, saves):
    targets, save = [], CheckpointFiles.save
    monkeypatch.setattr(CheckpointFiles, "save", lambda self, *given: targets.append(given[1]) or save(self, *given))
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 3})
    trainer.checkpoint_callback.every_n_iterations = every
    trainer.fit(module, datamodule=data)
    assert 1 <= len(targets) <= 3 if saves is None else len(targets) == saves
    assert torch.load(last_checkpoint(tmp_path / "run"), weights_only=True)["global_step"] == 3


def test_the_last_file_is_written_while_the_report_is_made(tmp_path, monkeypatch):
    made, save, seen = threading.Event(), torch.save, []
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: made.set())
    monkeypatch.setattr(saving.torch, "save", lambda *given: seen.append(made.wait(60)) or save(*given))
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 2}, report=True)
    trainer.checkpoint_callback.every_n_iterations = 0
    trainer.fit(module, datamodule=data)
    assert seen == [True]
    assert torch.load(last_checkpoint(tmp_path / "run"), weights_only=True)["global_step"] == 2


def test_a_run_under_an_average_goes_on_from_what_it_trained(tmp_path):
    def started(folder, **trainer):
        made = build(folder, callbacks=[EMAWeightAveraging(decay=0.5)], trainer=trainer)
        made[0].checkpoint_callback.every_n_iterations = 0
        return made

    trainer, whole, data = started(tmp_path / "whole", max_epochs=4)
    trainer.fit(whole, datamodule=data)
    trainer, cut, data = started(tmp_path / "cut", max_epochs=2)
    trainer.fit(cut, datamodule=data)
    saved = last_checkpoint(tmp_path / "cut" / "run")
    held = torch.load(saved, weights_only=True)
    name, averaged = next(iter(cut.named_parameters()))
    assert torch.equal(held["state_dict"][name], averaged)
    assert not torch.equal(held["current_model_state"][name], averaged)
    trainer, resumed, data = started(tmp_path / "cut", max_epochs=4)
    trainer.fit(resumed, datamodule=data, ckpt_path=saved, weights_only=True)
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


def test_a_run_that_is_ended_before_it_has_gone_on_leaves_the_checkpoint_that_it_took(tmp_path):
    class Signalled(RLCallback):
        def on_rollout_start(self, trainer, module, version):
            os.kill(os.getpid(), signal.SIGTERM)

    fit(tmp_path, trainer={"max_epochs": 2})
    saved = last_checkpoint(tmp_path / "run")
    before = saved.read_bytes()
    with pytest.raises(SystemExit):
        fit(tmp_path, callbacks=[Signalled()], ckpt_path=saved, trainer={"max_epochs": 3})
    assert saved.read_bytes() == before
    trainer, _, _ = fit(tmp_path, ckpt_path=saved, trainer={"max_epochs": 3})
    assert trainer.current_epoch == 3
