"""What a trainer was made with; its callbacks and those that are left out: tests/callbacks/test_run_folder.py."""

from lightning.pytorch import Trainer

from lit_qrl.precision import QATAligned
from lit_qrl.strategies import ColocatedStrategy
from lit_qrl.strategies.peers import trainer_settings

PLAIN = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
PLAIN |= {"enable_checkpointing": False}


def test_a_plugin_and_a_strategy_of_ours_are_described_and_lightnings_are_named():
    strategy, plugin = ColocatedStrategy(offload_optimizer=True), QATAligned("fp8_row")
    found = trainer_settings(Trainer(**PLAIN, strategy=strategy, devices=1, plugins=[plugin]))
    assert found["strategy"]["init_args"] == {"offload_optimizer": True}
    assert found["plugins"][0]["class_path"].endswith("QATAligned")
    assert found["precision"] is None
    found = trainer_settings(Trainer(**PLAIN, gradient_clip_val=0.5))
    expected = {"accelerator": "cpu", "strategy": "auto", "plugins": None, "precision": "32-true"}
    expected |= {"gradient_clip_val": 0.5, "callbacks": None}
    assert {name: found[name] for name in expected} == expected
