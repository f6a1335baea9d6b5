"""A callback by which one run publishes to an engine apart in several ways, one after the other."""

from lit_qrl.callbacks import RLCallback


class TakeTurns(RLCallback):
    """Sets the way that weights take before a publish.

    Args:
        ways: of `RemoteEngine`'s `transfer`.
        each: publishes of a way; the last way has the rest.
    """

    def __init__(self, ways: list[str], each: int) -> None:
        self.ways, self.each = ways, each

    def on_rollout_start(self, trainer, module, version):
        """Choose by the number of publishes before this one."""
        module.data.engine.transfer = self.ways[min(version // self.each, len(self.ways) - 1)]
