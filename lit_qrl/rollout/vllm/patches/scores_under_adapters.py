"""On CPU several sequences cannot be scored under an adapter.

The wrapper of the output head looks adapters up by sequence, but log-probs of a prompt ask for one row per token.
"""

from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def by_token(original: Any) -> Any:
    """Return the wrapper's function for as many rows as there are tokens."""

    def add_lora_logits(wrapper: Any, y: Tensor, x: Tensor, *args: Any, **options: Any) -> None:
        rows, by_sequence = x.reshape(-1, x.shape[-1]).shape[0], wrapper.sampler_indices
        if rows == by_sequence.numel():
            original(wrapper, y, x, *args, **options)
            return
        # An engine of ours has one adapter, so all sequences of a batch have the same.
        kept, count = by_sequence.clone(), wrapper.indices_len[1]
        wrapper._sampler_indices[:rows], wrapper.indices_len[1] = kept[0], rows
        try:
            original(wrapper, y, x, *args, **options)
        finally:
            wrapper._sampler_indices[: kept.numel()], wrapper.indices_len[1] = kept, count

    return add_lora_logits


_BASE = "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "the CPU wrapper looks adapters up by token where it gets tokens",
    {"vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits": by_token},
    [f"{_BASE}.{name}" for name in ("sampler_indices", "_sampler_indices", "indices_len")],
    device="cpu",
)
