"""Policies with other kernels than the project's own: Liger's, torch's compiler's; for two benchmarks."""

from typing import Any
from unittest.mock import patch

import torch
from transformers import AttentionInterface

from lit_qrl.network.padding_free import ATTENTION, attend
from lit_qrl.network.structure import decoder_layers
from lit_qrl.policy import CausalPolicy


class LigerPolicy(CausalPolicy):
    """`CausalPolicy` under Liger's kernels.

    Args:
        model: as of `CausalPolicy`.
        **options: the others of `CausalPolicy`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, fuse=False, **options)

    def configure(self) -> None:
        """Build the network, and let Liger exchange what it knows of it."""
        super().configure()
        from liger_kernel.transformers import monkey_patch

        # losses are ours: the head's logits are never made here
        losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        kind = self.network.config.model_type
        getattr(monkey_patch, f"apply_liger_kernel_to_{kind}")(model=self.network, **losses)


class CompiledPolicy(CausalPolicy):
    """`CausalPolicy` whose decoder layers torch compiles, each at its first call.

    Attention over the rows of a layout stays as it is: its number of calls follows from the completions' lengths.
    """

    def configure(self) -> None:
        """Build the network, whose layers stay apart from each other, and let torch compile them."""
        with patch("lit_qrl.policy.join_layers"):
            super().configure()
        AttentionInterface.register(ATTENTION, torch.compiler.disable(attend))
        for layer in decoder_layers(self.network)[1]:
            layer.compile(dynamic=True)
