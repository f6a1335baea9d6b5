"""Learner and engine on one GPU, one after the other in the same memory."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError, within_memory
from lit_qrl.optim.masters import MasterWeights
from lit_qrl.rollout.engine import RolloutEngine
from lit_qrl.run.description import Described
from lit_qrl.run.host_memory import HostMemory
from lit_qrl.strategies.sharded import check_strategy

_HOST_REMEDY = "Set trainer.strategy.offload_optimizer to false, or run where the host has more memory."
_BACK_REMEDY = "Set data.engine.sleep_level to 2, or an optimizer with a smaller state."


class ColocatedStrategy(Described, SingleDeviceStrategy):
    """Gives one device to the engine while completions are drawn, and to the learner during the update.

    ================= ==================================================================================================
    phase             what happens
    ================= ==================================================================================================
    rollout begins    the learner's gradients are freed, its optimizer state moves to the host (`offload_optimizer`),
                      the engine wakes, and the weights are published
    rollout ends      the engine sleeps as `data.engine.sleep_level` says, and the optimizer state comes back
    ================= ==================================================================================================

    Evaluations are rollouts too. With `sleep_level: 2` the engine forgets its weights, and all are published again.

    Args:
        offload_optimizer: keep the optimizer's state in pinned host memory while completions are drawn.
    """

    strategy_name = "colocated"

    def __init__(self, offload_optimizer: bool = False) -> None:
        super().__init__()
        self.offload_optimizer = offload_optimizer
        self.offloaded = OffloadedState()
        self._devices: list[torch.device] | None = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The Trainer's devices, which it sets before the strategy is used."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ConfigError(
                "ColocatedStrategy shares one device between learner and engine.",
                expected="trainer.devices: 1",
                given=len(devices),
                remedy="Set it, or use another strategy.",
            )
        self._devices, self._root_device = devices, devices[0]


def check_phases(trainer: Trainer, engine: RolloutEngine, every_n_iterations: int) -> None:
    """Raise `ConfigError` when engine, strategy and publisher do not agree on who holds what and sleeps when."""
    strategy, level = trainer.strategy, engine.sleep_level
    check_strategy(strategy)
    if isinstance(strategy, ColocatedStrategy):
        if not level and not strategy.offload_optimizer:
            raise ConfigError(
                "ColocatedStrategy has nothing to do.",
                expected="data.engine.sleep_level of 1 or 2, or offload_optimizer: true",
                given=f"sleep_level {level} of {type(engine).__name__}, offload_optimizer: false",
                remedy="Set one of them, or drop the strategy.",
            )
    elif level:
        raise ConfigError(
            "The engine would never sleep.",
            expected="trainer.strategy: ColocatedStrategy",
            given=f"{type(strategy).__name__} with data.engine.sleep_level {level}",
            remedy="Add --config configs/engine/vllm_colocated.yaml, or set sleep_level to 0.",
        )
    if level == 2 and every_n_iterations > 1:
        raise ConfigError(
            "A sleep of level 2 drops the weights, and the next iteration would need them.",
            expected="publisher.every_n_iterations: 1",
            given=every_n_iterations,
            remedy="Set data.engine.sleep_level to 1, which keeps them on the host.",
        )


def begin_rollout(trainer: Trainer, engine: RolloutEngine) -> None:
    """Make room for the engine, where the Trainer's strategy is ours, and wake one that sleeps."""
    strategy = trainer.strategy
    if isinstance(strategy, ColocatedStrategy):
        if trainer.training:  # an evaluation may stand in the middle of an accumulated step
            for parameter in trainer.lightning_module.parameters():
                parameter.grad = None
        if strategy.offload_optimizer:
            with within_memory("moving the optimizer's state to the host", _HOST_REMEDY):
                strategy.offloaded.to_host(strategy.optimizers)
        if strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()  # the engine cannot use what torch keeps for itself
    engine.wake()


def begin_update(trainer: Trainer, module: Any) -> None:
    """Send the engine to sleep and take the memory back, timed as `time/sleep`, where the strategy is ours."""
    strategy, engine = trainer.strategy, module.data.engine
    if not isinstance(strategy, ColocatedStrategy):
        return
    with module.iteration.timed("sleep"):
        engine.sleep()
        if strategy.offloaded.away:
            with within_memory("taking the optimizer's state back from the host", _BACK_REMEDY):
                strategy.offloaded.to_device(strategy.optimizers)


class OffloadedState:
    """Moves the state of optimizers to host memory and back, always into the same host buffers.

    Buffers are pinned where there is a GPU, so that both ways run at the speed of the bus. Single numbers, such as
    step counts, stay where they are.
    """

    def __init__(self) -> None:
        self._memory = HostMemory(pinned=torch.cuda.is_available())
        self._away: dict[tuple[int, str], tuple[Tensor, torch.device]] = {}

    @property
    def away(self) -> bool:
        """True between `to_host` and `to_device`."""
        return bool(self._away)

    @torch.no_grad()
    def to_host(self, optimizers: Iterable[Optimizer]) -> None:
        """Move what is on the device; a second call moves nothing."""
        if self.away:
            return
        self._memory.reset()
        for parameter, state, name, tensor in _tensors(optimizers):
            buffer = self._memory.like(tensor).copy_(tensor, non_blocking=True)
            self._away[id(parameter), name] = buffer, tensor.device
            state[name] = buffer
        if self.away and torch.cuda.is_available():
            torch.cuda.synchronize()  # before the memory is given to others

    @torch.no_grad()
    def to_device(self, optimizers: Iterable[Optimizer]) -> None:
        """Move everything back to where it was; what was replaced in the meantime, by a restored checkpoint, stays."""
        for parameter, state, name, tensor in _tensors(optimizers):
            buffer, home = self._away.get((id(parameter), name), (None, None))
            if tensor is buffer:
                state[name] = torch.empty_like(tensor, device=home).copy_(tensor, non_blocking=True)
        self._away.clear()


def _tensors(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, dict, str, Tensor]]:
    for outer in optimizers:
        for optimizer in (outer, outer.inner) if isinstance(outer, MasterWeights) else (outer,):
            for parameter, state in list(optimizer.state.items()):
                for name, value in list(state.items()):
                    if isinstance(value, Tensor) and value.numel() > 1:
                        yield parameter, state, name, value
