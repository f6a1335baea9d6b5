import os
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_qrl import CausalPolicy, GRPOModule, RolloutDataModule, default_callbacks, resume_from
from lit_qrl.callbacks import AIS
from lit_qrl.callbacks.run_folder import standing
from lit_qrl.cli.main import main
from lit_qrl.errors import ConfigError
from lit_qrl.objective import GRPO
from lit_qrl.precision import QATAligned
from lit_qrl.rollout import TransformersEngine
from lit_qrl.run.folder import RunLock, shown
from lit_qrl.run.interrupt import Interrupted
from tests.tables import csv_rows
from tests.tiny_run import DigitTask, configured, model_folder, parameters_of

SIZES = {"prompts_per_iteration": 4, "group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 8}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: None)  # drawing takes seconds
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


def learn(iterations, *callbacks, ckpt_path=None, policy=None, task=None, optimizer=None, sizes=(), **options):
    """Train as a program does; return (trainer, module)."""
    make = optimizer or (lambda named: torch.optim.AdamW(named, lr=1e-3))
    module = GRPOModule(CausalPolicy(model_folder(Path("model")), **(policy or {})), optimizer=make)
    data = RolloutDataModule(task or DigitTask(), TransformersEngine(), **{**SIZES, **dict(sizes)})
    forced = default_callbacks(*callbacks, name="mine", publisher={"format": "fp8_row"}, progress=None)
    settings = {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False, **options}
    trainer = Trainer(max_epochs=iterations, callbacks=forced, **settings)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module


def config(run="runs/mine/1"):
    return yaml.safe_load(Path(run, "config.yaml").read_text())


def test_a_program_s_run_is_a_run_of_the_command_line():
    """The folder has a run's files; the CLI goes on from it as the program would; export finds the model."""
    trainer, module = learn(1, AIS(clip=3.0))
    run = Path("runs/mine/1")
    assert trainer.default_root_dir == str(run.absolute())
    assert {"config.yaml", "metrics.csv", "events.jsonl", "samples.jsonl", "checkpoints"} <= {
        path.name for path in run.iterdir()
    }
    assert not (run / ".lock").exists()
    assert not Path("lightning_logs").exists()
    assert type(module.objective) is GRPO
    made = config()
    assert made["seed_everything"] == 0
    assert made["trainer"]["callbacks"][0]["init_args"]["clip"] == 3.0
    assert made["model"]["optimizer"]["init_args"]["lr"] == 1e-3
    assert made["model"]["objective"]["init_args"]["kl_coefficient"] == 0.0
    assert made["data"]["task"]["class_path"] == "tests.tiny_run.DigitTask"
    assert made["publisher"]["format"] == "fp8_row"

    path = resume_from("runs/mine")
    assert path == run / "checkpoints" / "last.ckpt"
    rewards = (run / "metrics.csv").read_text().splitlines()[1]
    main(["export", str(run), "--output", "exported"])
    exported = configured("exported")
    assert torch.equal(parameters_of(module), torch.cat([one.detach().flatten() for one in exported.parameters()]))

    options = ["--ckpt_path", "last", "--trainer.max_epochs", "2"]
    main(["fit", "--config", str(run / "config.yaml"), *options])
    by_command = torch.load(path, weights_only=True)["state_dict"]
    _, resumed = learn(2, AIS(clip=3.0))  # a whole run of two is the same as one that was continued
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, by_command[name]), name
    assert (run / "metrics.csv").read_text().splitlines()[1] == rewards


def test_going_on_stays_in_the_run_and_starting_anew_does_not():
    learn(1)
    trainer, _ = learn(2, ckpt_path=resume_from("runs/mine"))
    assert (shown(trainer.default_root_dir), trainer.global_step) == ("runs/mine/1", 2)
    assert sorted(path.name for path in Path("runs/mine").iterdir()) == ["1"]
    with pytest.raises(ConfigError, match="a new training there would overwrite"):
        learn(1, default_root_dir="runs/mine/1")
    trainer, _ = learn(1)
    assert shown(trainer.default_root_dir) == "runs/mine/2"


def test_a_run_that_was_evaluated_goes_on_in_its_own_folder():
    trainer, module = learn(1, AIS(), limit_val_batches=1)
    data = trainer.datamodule
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    assert shown(trainer.default_root_dir) == "runs/mine/1/test/1"
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    assert (trainer.current_epoch, shown(trainer.default_root_dir)) == (2, "runs/mine/1")
    assert [row["epoch"] for row in csv_rows("runs/mine/1/metrics.csv") if row["reward/mean"]] == ["0", "1"]
    assert not Path("runs/mine/1/validate/1/checkpoints").exists()


def test_the_trainer_is_set_as_a_run_needs_it():
    trainer, _ = learn(1, sizes={"micro_batches": 2}, logger=CSVLogger("elsewhere"))
    assert (trainer.accumulate_grad_batches, trainer.num_sanity_val_steps) == (2, 0)
    assert [type(one).__name__ for one in trainer.loggers] == ["RunCSVLogger", "CSVLogger"]
    assert not [one for one in trainer.callbacks if "Summary" in type(one).__name__]
    assert "accumulate_grad_batches" not in config()["trainer"]


def test_a_run_that_is_refused_leaves_no_folder_and_no_lock():
    with pytest.raises(ConfigError, match="group of one completion"):
        learn(1, sizes={"group_size": 1})
    assert not Path("runs").exists()
    lock = RunLock()
    lock.take(Path("runs/taken"))
    with pytest.raises(ConfigError, match="Another training runs"):
        learn(1, default_root_dir="runs/taken")
    lock.release()


def test_prompts_must_come_from_a_rollout_data_module():
    module = GRPOModule(CausalPolicy(model_folder(Path("model"))))
    trainer = Trainer(accelerator="cpu", callbacks=default_callbacks(progress=None), enable_progress_bar=False)
    with pytest.raises(ConfigError, match=r"no prompts.*RolloutDataModule"):
        trainer.fit(module)


def test_what_no_parser_builds_is_still_recorded():
    class Local(DigitTask):
        pass

    learn(1, task=Local())
    made = config()
    assert made["data"]["task"]["class_path"] == f"<Local of {__name__}>"
    main(["export", "runs/mine/1", "--output", "exported"])
    assert Path("exported/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        (torch.optim.AdamW, {"lr": 1e-6, "weight_decay": 0.0, "eps": 1e-8}),
        (lambda named: torch.optim.SGD(named, lr=0.5, momentum=0.9), {"lr": 0.5, "momentum": 0.9, "weight_decay": 0}),
    ],
)
def test_an_optimizer_is_recorded_as_it_was_made(optimizer, given):
    learn(1, optimizer=optimizer)
    made = config()["model"]["optimizer"]
    assert given.items() <= made["init_args"].items()
    assert made["class_path"].rpartition(".")[2] in ("AdamW", "SGD")


def test_an_interrupted_run_says_where_it_stands(tmp_path):
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, max_epochs=9, logger=False)
    assert standing(Interrupted(15), trainer, "…") == "\nInterrupted by SIGTERM."  # no training
    trainer.state.fn = TrainerFn.FITTING
    assert "by SIGTERM before the first iteration. No checkpoint" in standing(Interrupted(15), trainer, "…")
    trainer.fit_loop.epoch_progress.increment_ready()
    assert "Interrupted by SIGTERM in iteration 1 of 9. No checkpoint" in standing(Interrupted(15), trainer, "…")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert "last.ckpt is its last checkpoint. Go on with:\n  again" in standing(Interrupted(15), trainer, "again")


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_a_trained_policy_is_loaded_again_and_written_for_transformers(adapted):
    policy = {"lora": LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)} if adapted else None
    _, module = learn(1, policy=policy)
    again = GRPOModule.load_from_checkpoint("runs/mine/1/checkpoints/last.ckpt")
    assert torch.equal(parameters_of(again), parameters_of(module))
    assert (type(again.objective), again.policy.lora is None) == (GRPO, not adapted)
    module.policy.save_pretrained("saved")
    plain = AutoModelForCausalLM.from_pretrained("model" if adapted else "saved", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, "saved") if adapted else plain
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, module.policy.model(ids).logits, atol=1e-6, rtol=1e-5)
    assert AutoTokenizer.from_pretrained("saved").eos_token == module.policy.tokenizer.eos_token
    assert module.policy.network.config.use_cache is False


def test_what_is_no_deployable_policy_is_refused():
    with pytest.raises(ConfigError, match="no weights yet"):
        CausalPolicy(model_folder(Path("model"))).save_pretrained("saved")
    _, module = learn(1, plugins=[QATAligned("fp8_row")])
    with pytest.raises(ConfigError, match=r"computes in fp8_row.* lit-qrl export"):
        module.policy.save_pretrained("saved")
    assert not Path("saved").exists()
    with pytest.raises(ConfigError, match=r"config\.yaml is no configuration of a run"):
        GRPOModule.load_from_checkpoint("model/config.json")
