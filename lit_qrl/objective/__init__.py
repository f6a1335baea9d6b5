"""The objectives as classes for YAML."""

from lit_qrl.objective.base import Objective
from lit_qrl.objective.variants import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    SAPO,
    TBPO,
    Distillation,
    DrGRPO,
    DualClipGRPO,
    PositiveGRPO,
)

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "SAPO",
    "TBPO",
    "Distillation",
    "DrGRPO",
    "DualClipGRPO",
    "Objective",
    "PositiveGRPO",
]
