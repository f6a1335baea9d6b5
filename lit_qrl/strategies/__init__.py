"""Where learner and engine live."""

from lit_qrl.strategies.colocated import ColocatedStrategy

__all__ = ["ColocatedStrategy"]
