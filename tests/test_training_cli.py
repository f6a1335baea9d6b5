import pytest
from lightning.pytorch.callbacks import Timer

from lit_qrl import callbacks, objective, rollout
from lit_qrl.callbacks import AIS, TokenVeto, WeightPublisher
from lit_qrl.errors import ConfigError
from lit_qrl.training_cli import FORCED, check_place, check_repeated, known_classes, next_run_folder


@pytest.mark.parametrize(
    ("taken", "resume", "expected"),
    [
        ([], False, "1"),
        ([], True, "1"),
        (["1", "2"], False, "3"),
        (["1", "2"], True, "2"),
        (["2", "10", "9"], False, "11"),
        (["1", "notes", "3.old"], False, "2"),
    ],
)
def test_runs_are_numbered_and_the_newest_is_resumed(tmp_path, taken, resume, expected):
    for name in taken:
        (tmp_path / name).mkdir()
    assert next_run_folder(tmp_path, resume) == tmp_path / expected


def test_a_place_is_tried_and_left_as_it_was(tmp_path):
    check_place(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "run"
    kept.mkdir()
    (kept / "metrics.csv").write_text("epoch")
    check_place(kept)
    assert [path.name for path in kept.iterdir()] == ["metrics.csv"]


def test_a_place_under_a_file_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"cannot be written.*Not a directory.*trainer\.default_root_dir"):
        check_place(tmp_path / "file" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_callback_stands_once():
    check_repeated([AIS(), TokenVeto()])
    check_repeated(AIS())
    with pytest.raises(ConfigError, match=r"holds WeightPublisher.*`publisher`"):
        check_repeated([WeightPublisher()])
    with pytest.raises(ConfigError, match=r"cannot tell apart.*Timer"):
        check_repeated([Timer(), Timer()])
    with pytest.raises(ConfigError, match="AIS"):
        check_repeated([AIS(), AIS()])


def test_every_forced_callback_has_a_group_and_cannot_be_added():
    for group, cls in FORCED.items():
        with pytest.raises(ConfigError, match=f"holds {cls.__name__}.*`{group}`"):
            check_repeated([cls()])


def test_names_that_resolve_are_those_of_the_kind():
    corrections = [name for name in callbacks.__all__ if name != "RLCallback"]
    assert set(corrections) <= set(known_classes("trainer.callbacks"))
    assert "RLCallback" not in known_classes("trainer.callbacks")
    assert known_classes("data.engine") == sorted(
        name for name in vars(rollout) if name.endswith("Engine") and name != "RolloutEngine"
    )
    kinds = {name for name, value in vars(objective).items() if isinstance(value, type)}
    assert set(known_classes("model.objective")) <= kinds
    assert "GRPO" in known_classes("model.objective")
    assert {"torch.optim.AdamW", "MuonAdamW"} <= set(known_classes("model.optimizer"))
    assert {"AIS", "GRPO", "VLLMEngine"} <= set(known_classes())
    assert {"CSVLogger", "TensorBoardLogger"} <= set(known_classes("trainer.logger"))
    assert "AIS" not in known_classes("trainer.logger")
    assert known_classes("trainer.profiler") == []
