"""Callbacks by which one run publishes in several ways, one after the other, for one start."""

from dataclasses import replace

from lit_qrl import formats
from lit_qrl.callbacks import RLCallback, WeightPublisher


class TakeTurns(RLCallback):
    """Sets the way that weights take to an engine apart before a publish.

    Args:
        ways: of `RemoteVLLMEngine`'s `transfer`.
        each: publishes of a way; the last way has the rest.
    """

    def __init__(self, ways: list[str], each: int) -> None:
        self.ways, self.each = ways, each

    def on_rollout_start(self, trainer, module, version):
        """Choose by the number of publishes before this one."""
        module.data.engine.transfer = self.ways[min(version // self.each, len(self.ways) - 1)]


class ThenFormat(RLCallback):
    """Has another engine built, for another format of the sampler, when so many iterations are over.

    Args:
        format: from then on.
        after: iterations.
    """

    def __init__(self, format: str, after: int) -> None:
        self.format, self.after = format, after

    def on_train_epoch_start(self, trainer, pl_module):
        """End the engine, as after a death; the publisher's own hook comes after this one, and builds the next."""
        if trainer.current_epoch != self.after:
            return
        (found,) = [one for one in trainer.callbacks if isinstance(one, WeightPublisher)]
        found._disconnect()
        pl_module.data.engine.discard()
        found.spec = replace(found.spec, format=formats.get(self.format))
