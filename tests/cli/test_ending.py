"""A command's end leaves weights and states where they are, and tears down the rest."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import strategy as strategies

from lit_qrl.cli.training import leave_in_place


class Module(LightningModule):
    """One weight with AdamW; it knows when it is asked to go to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.asked = torch.nn.Linear(1, 1), 0

    def cpu(self) -> "Module":
        self.asked += 1
        return super().cpu()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def training_step(self, batch, _):
        if batch[0].item() < 0:
            raise ValueError("stopped")
        return self.linear(batch[0]).mean()


class Closed(TorchCheckpointIO):
    """Knows that it was torn down."""

    closed = False

    def teardown(self) -> None:
        self.closed = True


@pytest.mark.parametrize("number", [1.0, -1.0])
@pytest.mark.parametrize("left", [True, False])
def test_neither_module_nor_states_go_to_the_host(tmp_path, monkeypatch, number, left):
    moved, module, closed = [], Module(), Closed()
    assert isinstance(closed, CheckpointIO)
    real = strategies._optimizers_to_device
    monkeypatch.setattr(
        strategies, "_optimizers_to_device", lambda held, device: (moved.append(len(held)), real(held, device))
    )
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=1, logger=False, plugins=[closed], **options
    )
    if left:
        leave_in_place(trainer.strategy)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor([[number]])))
    if number < 0:
        with pytest.raises(ValueError, match="stopped"):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data)
    assert module.asked == (0 if left else 1)
    assert moved[-1] == (0 if left else 1)
    assert len(trainer.optimizers) == 1  # a shortage of memory is told with what they hold
    assert closed.closed
    module.cpu()
    assert module.asked == (1 if left else 2)
