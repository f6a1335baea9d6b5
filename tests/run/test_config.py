import pytest
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser

from lit_qrl.run.config import RunConfig, changed_settings, flat

BASE = """
seed_everything: 0
trainer:
  max_epochs: 2
  default_root_dir: runs/a/1
  plugins: null
  callbacks:
  - class_path: lit_qrl.callbacks.AIS
    init_args: {clip: 5.0, level: token}
model:
  objective:
    class_path: lit_qrl.objective.GRPO
    init_args: {clip_low: 0.2}
  optimizer:
    class_path: torch.optim.AdamW
    init_args: {lr: 0.001, betas: [0.9, 0.999]}
  lr_schedule: constant
  warmup: 0.0
data: {group_size: 8, evaluation_limit: 500}
progress: {header_every: 20}
ckpt_path: null
"""


def test_a_configuration_is_flat_under_the_command_line_s_keys():
    settings = flat(yaml.safe_load(BASE))
    assert settings["trainer.callbacks.AIS"] == "lit_qrl.callbacks.AIS"
    assert settings["trainer.callbacks.AIS.clip"] == 5.0
    assert settings["model.optimizer.betas"] == [0.9, 0.999]
    assert "trainer.plugins" not in settings
    assert flat({"rewards": [{"weight": 1}, {"weight": 2}]}) == {"rewards.0.weight": 1, "rewards.1.weight": 2}


def test_a_class_that_has_moved_is_no_change():
    former, now = (
        {"engine": {"class_path": f"lit_qrl.rollout.{where}.TransformersEngine", "init_args": {"share": "auto"}}}
        for where in ("transformers", "embedded.engine")
    )
    assert changed_settings(flat(former), flat(now), everything=True) == []


CHANGES = {
    "{}": [],
    "{trainer: {max_epochs: 9, default_root_dir: b, check_val_every_n_epoch: 3}, data: {evaluation_limit: 4}}": [],
    "{progress: {header_every: 3}, ckpt_path: last.ckpt, resume_if_possible: true}": [],
    "{model: {optimizer: {lr: 0.1}}, data: {group_size: 4}}": ["data.group_size", "model.optimizer.lr"],
    "seed_everything: 1": ["seed_everything"],
    # a class, whatever its arguments, and a callback more
    "{model: {objective: {class_path: lit_qrl.objective.GSPO, init_args: {clip: 1}}}}": ["model.objective"],
    "{trainer: {callbacks: [{class_path: a.TokenVeto, init_args: {threshold: 1}}]}}": ["trainer.callbacks.TokenVeto"],
    # the length of a decay, and of a warm-up
    "{trainer: {max_epochs: 9}, model: {lr_schedule: cosine}}": ["model.lr_schedule", "trainer.max_epochs"],
    "{trainer: {max_epochs: 9}, model: {warmup: 0.1}}": ["model.warmup", "trainer.max_epochs"],
}


@pytest.mark.parametrize(("changed", "expected"), CHANGES.items())
def test_what_changes_the_learning_is_named(changed, expected):
    former, changes = flat(yaml.safe_load(BASE)), flat(yaml.safe_load(changed))
    assert changed_settings(former, {**former, **changes}) == expected
    assert changed_settings({**former, **changes}, former) == [key for key in expected if key != "trainer.max_epochs"]


def test_everything_is_all_but_the_checkpoint():
    former = flat(yaml.safe_load(BASE))
    now = {**former, "trainer.max_epochs": 3, "ckpt_path": "a", "resume_if_possible": True}
    assert changed_settings(former, now, everything=True) == ["trainer.max_epochs"]


class Engine:
    """Of today; `fresh` is an option that a former version did not have."""

    def __init__(self, size: int = 1, fresh: str = "auto") -> None:
        pass


@pytest.mark.parametrize(("fresh", "named"), [("auto", []), ("never", ["data.engine.fresh"])])
def test_options_that_a_former_version_did_not_have_are_as_it_was_while_at_their_defaults(
    tmp_path, caplog, fresh, named
):
    parser = LightningArgumentParser()
    parser.add_argument("--ckpt_path", type=str | None)
    parser.add_argument("--model.pace", type=float, default=0.5)
    parser.add_argument("--data.engine", type=Engine)
    engine = {"class_path": f"{__name__}.Engine", "init_args": {"size": 2}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"ckpt_path": None, "data": {"engine": engine}}))
    now = {**engine, "init_args": {"size": 2, "fresh": fresh}}
    checkpoint = str(tmp_path / "checkpoints" / "last.ckpt")
    config = parser.parse_object({"ckpt_path": checkpoint, "data": {"engine": now}})
    RunConfig(parser, config)._compare(tmp_path / "config.yaml", resumes=True)
    said = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert [name for name in ("data.engine.fresh", "model.pace") if name in "".join(said)] == named
    assert (tmp_path / "config.1.yaml").exists() == bool(named)


def test_a_default_that_is_a_member_is_written_as_its_value():
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    timer = {"class_path": "Timer", "init_args": {"duration": "00:00:00:01"}}
    written = yaml.safe_load(parser.dump(parser.parse_object({"callbacks": [timer]})))
    assert written["callbacks"][0]["init_args"]["interval"] == "step"
