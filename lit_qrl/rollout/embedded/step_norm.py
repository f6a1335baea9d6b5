"""RMS norms that take one kernel where a sampler decodes one token of each row."""

import torch
from torch import Tensor, nn

from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.structure import RMS_NORMS
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm


class StepNorm(OnePassRMSNorm):
    """An RMS norm whose mean a decoding step sums in the kernel, in another order; other passes take the plain order.

    Args:
        norm: the module whose place it takes and whose weight it owns.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm, columns=False, codes=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `weight · x / sqrt(mean x² + ε)`: "b 1 … k" -> "b 1 … k" in a step."""
        half = x.dtype in (torch.bfloat16, torch.float16) and self.weight.dtype == x.dtype
        if x.shape[1] == 1 and half and dispatch.available(x) and not torch.is_grad_enabled():
            from lit_qrl.rollout import norm_triton

            if x.shape[-1] <= norm_triton.WIDEST:
                return norm_triton.norm(x.contiguous(), None, self.weight, self.variance_epsilon)
        return super().forward(x)


def take_step_norms(network: nn.Module) -> int:
    """Replace the norms of a sampler in place, those of queries and keys too, and return how many; names stay.

    Args:
        network: of decoder layers as in Llama, Mistral, Qwen2 and Qwen3; other norms stay as they are.
    """
    count = 0
    for part in list(network.modules()):
        for child, inner in list(part.named_children()):
            if type(inner) is OnePassRMSNorm or type(inner).__name__ in RMS_NORMS:
                setattr(part, child, StepNorm(inner))
                count += 1
    return count
