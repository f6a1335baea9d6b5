"""Memory that runs out anywhere in a run: one paragraph, and a status that says whether it has ever sufficed."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from lit_qrl.cli.main import fail, main
from lit_qrl.errors import EXIT_CONFIG, EXIT_STOPPED, ConfigError, MemoryShortageError, StoppedError
from lit_qrl.formats import FP8Row
from lit_qrl.module import GRPOModule
from lit_qrl.policy import CausalPolicy
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.run.stop import in_use, stop_run, stop_where_short
from tests.tiny_run import build, command, model_folder
from tests.two_processes import RANKS, free_ports, join, started

SHORT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
)


def late(original, calls=0, error=torch.OutOfMemoryError):
    """A function that raises from the n-th call on; n counts calls of the original."""
    left = [calls]

    def failing(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise error(SHORT)
        return original(*args, **kwargs)

    return failing


PLACES = {
    "loading the policy": (CausalPolicy, "configure"),
    "scoring a rollout": (CausalPolicy, "forward"),
    "computing a micro-batch's loss": (CausalPolicy, "forward"),
    "computing a micro-batch's gradient": (torch.Tensor, "backward"),
    "stepping the optimizer": (LightningModule, "optimizer_step"),
    "quantizing model.layers.0.self_attn.q_proj.weight (0.00 GiB) to fp8_row": (FP8Row, "quantize"),
    "publishing the weights to the engine": (TransformersEngine, "load_weights"),
    "reading back what the engine holds": (TransformersEngine, "read_back"),
}


@pytest.mark.parametrize("doing", PLACES)
def test_memory_that_never_sufficed_is_a_configuration_that_does_not_fit(tmp_path, monkeypatch, doing):
    owner, name = PLACES[doing]
    trainer, module, data = build(tmp_path, data={"passes": 2} if doing.startswith("scoring") else {})
    monkeypatch.setattr(owner, name, late(getattr(owner, name)))
    with pytest.raises(ConfigError) as caught:
        trainer.fit(module, datamodule=data)
    said = str(caught.value)
    assert said.startswith(f"The run does not fit. Memory ran out while {doing}: 2.50 GiB were asked for and 1.20 GiB")
    assert f"The learner holds {0 if doing.startswith('loading') else ''}" in said
    of_the_publish = doing.startswith(("quantizing", "publishing", "reading"))
    assert "model.policy.gradient_checkpointing: true" in said or of_the_publish
    (event,) = (one for one in read_jsonl(tmp_path / "run" / "events.jsonl") if one["kind"] == "stopped")
    assert event["cause"] == "out_of_memory"


def test_memory_that_ran_out_later_is_a_run_that_could_not_go_on(tmp_path, monkeypatch):
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 3})
    monkeypatch.setattr(LightningModule, "optimizer_step", late(LightningModule.optimizer_step, 1))
    with pytest.raises(StoppedError, match="Memory ran out while stepping the optimizer") as caught:
        trainer.fit(module, datamodule=data)
    assert "0.0 MiB of optimizer states" not in str(caught.value)


def test_an_engine_that_memory_fails_is_told_as_a_shortage_when_it_is_given_up(tmp_path, monkeypatch):
    def dies(*args, **kwargs):
        raise EngineDiedError(f"vLLM failed while generating: OutOfMemoryError: {SHORT}")

    trainer, module, data = build(tmp_path, publisher={"max_restarts": 1})
    monkeypatch.setattr(TransformersEngine, "generate", dies)
    with pytest.raises(ConfigError, match=r"Memory ran out in the engine: 2\.50 GiB were asked for"):
        trainer.fit(module, datamodule=data)
    deaths = [one for one in read_jsonl(tmp_path / "run" / "events.jsonl") if one["kind"] == "engine_died"]
    assert len(deaths) == 2


def test_what_is_no_shortage_stays_what_it_is(tmp_path, monkeypatch):
    assert stop_where_short(None, RuntimeError("shapes")) is None
    assert stop_where_short(None, StoppedError("The run was stopped: it said 'out of memory' itself.")) is None
    trainer, module, data = build(tmp_path)
    monkeypatch.setattr(CausalPolicy, "forward", late(CausalPolicy.forward, error=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, datamodule=data)


def learner(**options):
    weight = torch.nn.Parameter(torch.zeros(2**18))
    weight.grad = torch.zeros(2**18)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module = torch.nn.ParameterList([weight])
    return SimpleNamespace(lightning_module=module, strategy=strategy, optimizers=[optimizer], **options)


def test_what_the_learner_holds_is_named_by_its_parts():
    said = in_use(learner())
    assert said == "The learner holds 1.0 MiB of weights, 1.0 MiB of gradients, 2.0 MiB of optimizer states on cpu."


def test_the_command_line_says_one_paragraph_and_exits_as_it_never_fitted(tmp_path, monkeypatch, capsys):
    model = model_folder(tmp_path / "model")
    monkeypatch.setattr(GRPOModule, "on_train_batch_start", late(None))  # where nothing names the work
    with pytest.raises(SystemExit) as caught:
        main(command(tmp_path, model))
    said = " ".join(capsys.readouterr().err.split())
    assert caught.value.code == EXIT_CONFIG
    assert "The run does not fit. Memory ran out: 2.50 GiB were asked for" in said
    assert "Traceback" not in said


# -------------------------------------------------------------------------------------------------------- two processes


class RunsOut(Callback):
    """Lets memory run out on one process, in an iteration."""

    def __init__(self, rank, iteration):
        self.rank, self.iteration = rank, iteration

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.global_rank, trainer.current_epoch) == (self.rank, self.iteration):
            pl_module.policy.forward = late(None)


def runs_out(rank, ports, folder, where):
    with (folder / f"{rank}.txt").open("w") as said:
        os.dup2(said.fileno(), 2)
        sys.stderr = said
        join(rank, iter(ports))
        trainer, module, data = build(
            folder,
            callbacks=[RunsOut(*where)],
            data={"prompts_per_iteration": 8},
            trainer={"max_epochs": 3, "devices": RANKS, "strategy": "ddp"},
        )
        try:
            trainer.fit(module, datamodule=data)
        except ConfigError as error:
            fail(str(error), EXIT_CONFIG)
        except StoppedError as error:
            fail(str(error), EXIT_STOPPED)


@pytest.mark.parametrize(
    ("where", "status"), [((1, 0), EXIT_CONFIG), ((0, 0), EXIT_CONFIG), ((1, 1), EXIT_STOPPED)], ids=str
)
def test_memory_of_one_of_two_processes_ends_both_with_one_paragraph(tmp_path, where, status):
    model_folder(tmp_path / "model")
    processes = started(runs_out, free_ports(1), tmp_path, where)
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [status] * RANKS
    said = [" ".join((tmp_path / f"{rank}.txt").read_text().split()) for rank in range(RANKS)]
    first, second = said[where[0]], said[1 - where[0]]
    assert first.count("Memory ran out while computing a micro-batch's loss: 2.50 GiB were asked for") == 1
    assert "Memory ran out" not in second
    assert "Start the run again" not in first
    assert "Traceback" not in first + second


def test_a_shortage_says_its_own_remedy_once(tmp_path):
    made = learner(default_root_dir=str(tmp_path), is_global_zero=True, current_epoch=0, world_size=1, global_step=0)
    with pytest.raises(ConfigError) as caught:
        stop_where_short(made, MemoryShortageError("Memory ran out while publishing: much. Take less."))
    assert str(caught.value).startswith(
        "The run does not fit. Memory ran out while publishing: much. Take less. The learner holds 1.0 MiB"
    )
    assert "What helps" not in str(caught.value)


class Saves:
    """A checkpoint callback that only has the method."""

    def save_before_update(self, trainer):
        path = trainer.folder / "checkpoints" / "last.ckpt"
        path.parent.mkdir()
        path.touch()


def trainer(folder, processes=1):
    found = SimpleNamespace(folder=folder, default_root_dir=str(folder), callbacks=[object(), Saves()])
    vars(found).update(is_global_zero=True, current_epoch=6, world_size=processes)
    return found


@pytest.mark.parametrize("save", [True, False])
def test_it_says_which_checkpoint_is_left_and_writes_one_only_where_asked(tmp_path, save):
    cause = RuntimeError("boom")
    with pytest.raises(StoppedError, match="by the guard: It broke") as caught:
        stop_run(trainer(tmp_path), "engine_died", "It broke.", save=save, error=cause)
    expected = f"The last good checkpoint is {tmp_path / 'checkpoints' / 'last.ckpt'}." if save else "No checkpoint had"
    assert expected in str(caught.value)
    assert caught.value.__cause__ is cause
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event["cause"], event["iteration"]) == ("stopped", "engine_died", 7)


def test_one_of_several_processes_does_not_wait_for_the_others_to_save_with_it(tmp_path):
    with pytest.raises(StoppedError, match="No checkpoint had been written"):
        stop_run(trainer(tmp_path, processes=2), "engine_died", "It broke.", save=True)
