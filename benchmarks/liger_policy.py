"""A policy whose norms, gated MLPs and rotary embeddings are Liger's, beside the project's own; for `iteration.py`."""

from typing import Any

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
