from lightning.pytorch import Trainer

from lit_qrl.callbacks import AIS, TruncatedIS
from lit_qrl.precision import QATAligned
from lit_qrl.strategies import ColocatedStrategy
from lit_qrl.strategies.peers import trainer_settings

PLAIN = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_what_a_trainer_was_made_with_is_read_from_it():
    trainer = Trainer(
        **PLAIN, callbacks=[AIS(clip=4.0)], max_epochs=9, gradient_clip_val=0.5, enable_checkpointing=False
    )
    found = trainer_settings(trainer)
    assert (found["max_epochs"], found["gradient_clip_val"], found["accelerator"], found["strategy"]) == (
        *(9, 0.5),
        *("cpu", "auto"),
    )
    assert [one["init_args"]["clip"] for one in found["callbacks"]] == [4.0]
    assert found["plugins"] is None
    assert found["precision"] == "32-true"


def test_a_plugin_and_a_strategy_of_ours_are_described():
    trainer = Trainer(
        **PLAIN, strategy=ColocatedStrategy(offload_optimizer=True), devices=1, plugins=[QATAligned("fp8_row")]
    )
    found = trainer_settings(trainer)
    assert found["strategy"]["init_args"] == {"offload_optimizer": True}
    assert found["plugins"][0]["class_path"].endswith("QATAligned")
    assert found["precision"] is None


def test_classes_that_are_left_out_are_not_among_the_callbacks():
    trainer = Trainer(**PLAIN, callbacks=[AIS(), TruncatedIS()], enable_checkpointing=False)
    found = trainer_settings(trainer, without=(AIS,))
    assert [one["class_path"].rpartition(".")[2] for one in found["callbacks"]] == ["TruncatedIS"]
