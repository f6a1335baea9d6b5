"""Strategies that no run here can use yet: those under which no process holds a whole learner."""

from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from lit_qrl.errors import ConfigError

SHARDED = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


def check_strategy(strategy: Strategy) -> None:
    """Raise `ConfigError` for a strategy that shards the learner.

    A publish reads whole weights, a checkpoint holds whole tensors and the optimizers here see whole matrices; under
    these strategies each rank would publish, sample from and save its own part.

    Args:
        strategy: of the Trainer.
    """
    if isinstance(strategy, SHARDED):
        raise ConfigError(
            f"{type(strategy).__name__} shards the learner over processes, which a publish to the sampler cannot read.",
            expected="trainer.strategy: auto, ddp or ColocatedStrategy, under which every process holds all weights",
            given=type(strategy).__name__,
            remedy="Where one device is too small, train a LoRA (model.policy.lora), keep the base packed (NVFP4LoRA), "
            "or let engine and learner take turns on it (ColocatedStrategy).",
        )
