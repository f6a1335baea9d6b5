"""Learner and engines on devices of their own: which are the learner's."""

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from lit_qrl.rollout.engine import Learners


def learners(trainer: Trainer) -> Learners:
    """Return what an engine is told of the learner's processes, so that it takes other GPUs than theirs.

    Args:
        trainer: whose strategy has its devices.
    """
    size = max(trainer.world_size // max(trainer.num_nodes, 1), 1)
    return Learners(
        devices=tuple(trainer.device_ids) if isinstance(trainer.accelerator, CUDAAccelerator) else (),
        local=(trainer.local_rank, size),
        whole=(trainer.global_rank, trainer.world_size),
    )
