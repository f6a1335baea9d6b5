"""Where learner and engine live."""

from lit_qrl.strategies.colocated import ColocatedStrategy
from lit_qrl.strategies.sharded import ShardedStrategy

__all__ = ["ColocatedStrategy", "ShardedStrategy"]
