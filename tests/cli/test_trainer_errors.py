"""Settings given to the installed Lightning, so that another wording in a later version is noticed."""

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.accelerators.mps import MPSAccelerator

from lit_qrl.cli.trainer_errors import REFUSALS, refused
from lit_qrl.errors import ConfigError
from lit_qrl.precision import QATAligned

SETTINGS = {
    "accelerator": ({"accelerator": "gpuu"}, ["trainer.accelerator: gpuu", "Did you mean 'gpu'?"]),
    "no GPU": ({"accelerator": "gpu"}, ["trainer.accelerator: gpu", "Set trainer.accelerator to auto", "cpu"]),
    "no CUDA": ({"accelerator": "cuda"}, ["trainer.accelerator: cuda", "Set trainer.accelerator to auto", "cpu"]),
    "strategy": ({"strategy": "dddp"}, ["trainer.strategy: dddp", "Did you mean 'ddp'?"]),
    "strategy of a GPU": (
        {"strategy": "fsdp", "accelerator": "cpu"},
        ["trainer.strategy: fsdp", "trainer.accelerator: cpu", "Set trainer.strategy to auto"],
    ),
    "devices": ({"devices": 0, "accelerator": "cpu"}, ["trainer.devices: 0", "Correct trainer."]),
    "devices by number": ({"devices": [0, 1], "accelerator": "cpu"}, ["trainer.devices: [0, 1]", "Correct trainer."]),
    "precision beside a plugin": (
        {"precision": "16-mixed", "plugins": QATAligned("fp8_row")},
        ["trainer.precision: 16-mixed", "trainer.plugins: QATAligned", "Leave trainer.precision out"],
    ),
    "epochs": ({"max_epochs": -3}, ["trainer.max_epochs: -3", "Correct trainer.max_epochs."]),
    "library that is missing": ({"accelerator": "tpu"}, ["torch_xla", "trainer.accelerator: tpu"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_lightning_refuses_names_key_value_and_remedy(case, monkeypatch):
    for accelerator in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: False))
    settings, words = SETTINGS[case]
    with pytest.raises(REFUSALS) as caught:
        Trainer(logger=False, enable_checkpointing=False, **settings)
    text = str(refused(caught.value, {"devices": "auto", **settings}))
    assert text.startswith("Lightning cannot build the Trainer: ")
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_an_error_that_names_no_setting_shows_the_hardware():
    error = refused(ValueError("Odd.\nVery odd."), {"accelerator": "cpu", "devices": "auto", "max_epochs": 3})
    assert isinstance(error, ConfigError)
    assert str(error).startswith("Lightning cannot build the Trainer: Odd. Very odd. Given: trainer.accelerator: cpu. ")
    assert str(refused(ValueError("Odd"), {})).endswith("Trainer: Odd. See lit-qrl fit --help.")
