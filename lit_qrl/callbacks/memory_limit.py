"""A limit to what a run takes of its GPU's memory, as a callback."""

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lit_qrl.errors import ConfigError

log = logging.getLogger(__name__)


class MemoryLimit(Callback):
    """Keeps what this process allocates on its GPU under so many GiB, the engine in it included.

    torch's allocator is told, which first gives back what it holds unused, and then says that memory ran out.
    `gradient_checkpointing: auto`, `micro_batches: auto` and the embedded engine's cache take what the limit leaves
    instead of what is free. The driver shows more: by the CUDA context and what libraries take beside torch, a GiB or
    so, and by other processes, as of an engine apart. An engine that sleeps counts as if it were awake.

    Args:
        gib: of each process.

    Raises:
        ConfigError: where there is no GPU, or it has less.
    """

    def __init__(self, gib: float) -> None:
        if not gib > 0:
            raise ConfigError("MemoryLimit leaves no memory.", expected="gib above 0", given=gib)
        self.gib = gib

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda":
            raise ConfigError(
                "MemoryLimit is of a GPU's memory.",
                expected="trainer.accelerator: gpu",
                given=device.type,
                remedy="Remove the callback.",
            )
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        if self.gib > total:
            raise ConfigError(
                "MemoryLimit is above what there is.",
                expected=f"gib of at most {total:.1f}, which {device} has",
                given=self.gib,
                remedy="Lower it, or remove the callback.",
            )
        torch.cuda.set_per_process_memory_fraction(self.gib / total, device)
        log.info("This process allocates at most %.1f GiB of %s, which has %.1f.", self.gib, device, total)
