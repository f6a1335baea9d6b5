"""The part of a vLLM engine that gives the device's memory back while the learner works."""

from typing import Any

import torch

from lit_qrl.errors import within_memory
from lit_qrl.rollout.vllm.adapter import LiveAdapter
from lit_qrl.rollout.vllm.errors import deadly
from lit_qrl.rollout.vllm.live_model import LiveModel
from lit_qrl.rollout.vllm.locations import weight_bytes
from lit_qrl.rollout.vllm.upkeep import unlock_workspaces
from lit_qrl.rollout.vllm.watchdog import Watchdog

SLEEP_REMEDY = "A sleep of level 1 keeps the weights in memory of the host: set data.engine.sleep_level to 2."
WAKE_REMEDY = "Lower data.engine.gpu_memory_utilization, or set trainer.strategy.offload_optimizer to true"


class Sleeping:
    """The part of `VLLMEngine` that sleeps and wakes; see `Sleeps`."""

    llm: Any
    live: LiveModel | None
    sleep_level: int
    _adapter: LiveAdapter | None
    _usable: bool
    _poisoned: bool
    _asleep: bool

    def _watchdog(self, what: str, timeout: float | None = None) -> Watchdog:
        raise NotImplementedError

    def weight_bytes(self) -> int:
        """Return the memory that the sampler's weights take."""
        return 0 if self.live is None else weight_bytes(self.live.model)

    @property
    def holds_weights(self) -> bool:
        """False before the first publish, after a death, and after a sleep of level 2."""
        return self._usable

    def sleep(self) -> None:
        """Free the KV cache, and the weights as `sleep_level` says, or die of it; does nothing on CPU."""
        if self.llm is not None and self.sleep_level and torch.cuda.is_available() and not self._asleep:
            watchdog = self._watchdog("the sleep")
            with deadly("did not sleep", watchdog), within_memory("the engine fell asleep", SLEEP_REMEDY):
                self.llm.sleep(level=self.sleep_level)
            self._asleep = True
            self._usable = self._usable and self.sleep_level < 2

    def wake(self) -> None:
        """Take the memory back, or die of it; after level 2 all weights must be published before anything is drawn."""
        if not self._asleep:
            return
        with deadly("did not wake", self._watchdog("waking"), WAKE_REMEDY):
            self.llm.wake_up()
        # Memory comes back with arbitrary contents, at the addresses that it had.
        unlock_workspaces()
        self._poisoned = True
        if not self._usable and self._adapter is not None:
            self._adapter.clear()
        self._asleep = False
