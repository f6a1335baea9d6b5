"""A command's end leaves weights and states where they are, and tears down the rest."""

from contextlib import nullcontext

import pytest
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import strategy as strategies

from lit_qrl.cli.training import leave_in_place
from tests.callbacks import tiny_loop


class Module(tiny_loop.Module):
    """Knows when it is asked to go to the host."""

    asked = 0

    def cpu(self):
        self.asked += 1
        return super().cpu()


@pytest.mark.parametrize("error", [None, ValueError("stopped")])
@pytest.mark.parametrize("left", [True, False])
def test_neither_module_nor_states_go_to_the_host(tmp_path, monkeypatch, error, left):
    moved, closed, module, files = [], [], Module(0, error) if error else Module(), TorchCheckpointIO()
    real = strategies._optimizers_to_device
    monkeypatch.setattr(
        strategies, "_optimizers_to_device", lambda held, device: (moved.append(len(held)), real(held, device))
    )
    monkeypatch.setattr(files, "teardown", lambda: closed.append(True))
    trainer = tiny_loop.trainer_of(tmp_path, [], 1, logger=False, plugins=[files], enable_progress_bar=False)
    if left:
        leave_in_place(trainer.strategy)
    with pytest.raises(ValueError, match="stopped") if error else nullcontext():
        trainer.fit(module)
    assert module.asked == (0 if left else 1)
    assert moved[-1] == (0 if left else 1)
    assert len(trainer.optimizers) == 1  # a shortage of memory is told with what they hold
    assert closed
    module.cpu()
    assert module.asked == (1 if left else 2)
