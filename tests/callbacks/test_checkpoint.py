import os
import signal
import threading
import time

import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.connectors import signal_connector
from peft import LoraConfig

from lit_qrl.callbacks import AIS, AQNNoise, checkpoint
from lit_qrl.callbacks.checkpoint import resolve_checkpoint
from lit_qrl.errors import ConfigError
from lit_qrl.run import checkpoint_files as saving
from lit_qrl.run.checkpoint_files import CheckpointFiles
from lit_qrl.run.folder import last_checkpoint, shown
from lit_qrl.run.interrupt import Interrupted
from tests.tiny_run import build, calling, fit, model_folder, parameters_of


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    def run(name, ckpt_path=None, **trainer):
        callbacks = [AIS(), AQNNoise(num_stages=2)]
        return fit(tmp_path / name, ckpt_path, callbacks=callbacks, trainer={"max_epochs": 4, **trainer})

    _, whole, _ = run("whole")
    run("cut", max_steps=2)
    trainer, resumed, _ = run("cut", last_checkpoint(tmp_path / "cut" / "run"))
    assert trainer.current_epoch == 4
    assert torch.equal(parameters_of(resumed), parameters_of(whole))


def test_a_last_checkpoint_that_takes_long_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.2)
    save = saving.CheckpointFiles.save
    monkeypatch.setattr(saving.CheckpointFiles, "save", lambda *given: [time.sleep(0.5), save(*given)])
    fit(tmp_path)
    line = f"Writing the last iteration's checkpoint: {shown(tmp_path / 'run' / 'checkpoints' / 'last.ckpt')}"
    assert capsys.readouterr().out.count(line) == 1


def test_nothing_is_left_beside_the_checkpoint_and_copies_are_numbered(tmp_path):
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 2})
    trainer.checkpoint_callback.keep_every = 2
    trainer.fit(module, datamodule=data)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["iteration-2.ckpt", "last.ckpt"]


def test_resolve_last_and_missing(tmp_path):
    assert resolve_checkpoint(None, tmp_path, False) is None
    assert resolve_checkpoint(None, tmp_path, True) is None
    for given, said in (("last", "no checkpoint to resume"), (str(tmp_path / "other.ckpt"), "does not exist")):
        with pytest.raises(ConfigError, match=said):
            resolve_checkpoint(given, tmp_path, False)


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


@pytest.mark.parametrize(
    ("hook", "iteration", "number"),
    [
        ("on_train_batch_end", 2, signal.SIGTERM),
        ("on_train_batch_end", 2, signal.SIGUSR1),
        ("on_publish", 3, signal.SIGTERM),
        ("on_rollout_end", 3, signal.SIGTERM),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint_of_whole_iterations(hook, iteration, number, tmp_path, monkeypatch):
    def send(trainer, module, *given):
        if trainer.current_epoch == iteration - 1 and (hook != "on_train_batch_end" or given[-1] == 0):
            os.kill(os.getpid(), number)
        return given[-1]

    options = {"data": {"mini_batches": 2}, "trainer": {"max_epochs": 4}}
    _, whole, _ = fit(tmp_path / "whole", **options)
    before = signal.getsignal(signal.SIGTERM)
    if number == signal.SIGUSR1:  # at which Lightning saves in the middle of the updates, and queues the job again
        for name, value in SLURM.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        options["trainer"]["plugins"] = [SLURMEnvironment()]
        monkeypatch.setattr(signal_connector, "call", lambda command: pytest.fail(str(command)))
    trainer, module, data = build(tmp_path / "cut", callbacks=[calling(**{hook: send})], **options)
    trainer.checkpoint_callback.every_n_iterations = 0
    with pytest.raises(SystemExit) as ended:
        trainer.fit(module, datamodule=data)
    assert isinstance(ended.value.__context__, Interrupted)
    assert signal.getsignal(signal.SIGTERM) is before
    saved = last_checkpoint(tmp_path / "cut" / "run")
    assert torch.load(saved, weights_only=True)["global_step"] == 4  # both updates of two iterations
    assert not list((tmp_path / "cut" / "run").glob("hpc*"))
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
    fit(tmp_path, trainer={"max_epochs": 2})
    saved = last_checkpoint(tmp_path / "run")
    before = saved.read_bytes()
    stop = calling(on_rollout_start=lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        fit(tmp_path, callbacks=[stop], ckpt_path=saved, trainer={"max_epochs": 3})
    assert saved.read_bytes() == before
    trainer, _, _ = fit(tmp_path, ckpt_path=saved, trainer={"max_epochs": 3})
    assert trainer.current_epoch == 3
