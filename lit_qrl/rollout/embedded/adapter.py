"""A LoRA adapter beside the embedded sampler's linear layers, never merged into them."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_qrl.network.adapters import check_separable
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.receipts.ledger import Fault, PublishError, ReceivedLedger, RefusedError
from lit_qrl.rollout.embedded.loading import Modules

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"


class LowRankTerm:
    """A forward hook that adds `x Aᵀ Bᵀ · scale` to a linear layer's output, as PEFT's unmerged layer computes it.

    Args:
        a: "rank in".
        b: "out rank".
        scale: the adapter's α / rank (or its root).
    """

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self.a, self.b, self.scale = a, b, scale
        self._factors: dict[torch.dtype, tuple[Tensor, Tensor]] = {a.dtype: (a, b)}

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the layer's output with the term added, in the output's dtype."""
        x = args[0]
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else self.a.dtype
        if dtype not in self._factors:
            self._factors[dtype] = self.a.to(dtype), self.b.to(dtype)
        a, b = self._factors[dtype]
        return (output + F.linear(F.linear(x.to(dtype), a), b) * self.scale).to(output.dtype)


class EmbeddedAdapter:
    """The one adapter of an embedded sampler.

    Args:
        modules: the sampler's.
        config: the policy's PEFT config.
    """

    def __init__(self, modules: Modules, config: Any) -> None:
        check_separable(config)
        self.modules, self.config = modules, config
        self._hooks: list[Any] = []

    @torch.no_grad()
    def load(self, tensors: Iterator[tuple[str, Tensor]], received: ReceivedLedger) -> None:
        """Replace the adapter by copies of `tensors` and write into `received` what the layers hold.

        Args:
            tensors: PEFT's checkpoint names (`base_model.model.<layer>.lora_A.weight`) and tensors.
            received: the engine's ledger.

        Raises:
            PublishError: when one of a layer's two factors is missing; the old adapter stays.
            RefusedError: for a tensor that is no factor of a linear layer, or of another shape.
        """
        given: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name in given:
                received.record(name, tensor)
            given[name] = tensor
        layers = list(dict.fromkeys(name.removesuffix(A).removesuffix(B) for name in given))
        lacking = [layer + end for layer in layers for end in (A, B) if layer + end not in given]
        foreign = [layer for layer in layers if layer.removeprefix(PREFIX) not in self.modules.linears]
        if foreign:
            raise RefusedError(
                f"The sampler has no linear layer for {foreign[0]}. Expected: {PREFIX}<layer>{A} and {B}. "
                "Restrict lora.target_modules to linear layers, or set publisher.lora to merged."
            )
        if lacking:
            raise PublishError([Fault("missing", name) for name in lacking], received.version)
        terms = {layer.removeprefix(PREFIX): self._term(layer, given) for layer in layers}
        self.remove()
        for layer, term in terms.items():
            module: Any = self.modules.network.get_submodule(layer)
            self._hooks.append(module.register_forward_hook(term))
            for end, held in ((A, term.a), (B, term.b)):
                received.record(f"{PREFIX}{layer}{end}", held)

    def _term(self, name: str, given: dict[str, Tensor]) -> LowRankTerm:
        layer = name.removeprefix(PREFIX)
        module = self.modules.network.get_submodule(layer)
        assert isinstance(module, nn.Linear | QuantizedLinear)
        a, b = (given[name + end].detach().to(self.modules.device, copy=True) for end in (A, B))
        if a.shape != (b.shape[1], module.in_features) or b.shape[0] != module.out_features:
            raise RefusedError(
                f"The adapter of {layer} does not fit. Expected: A (rank, {module.in_features}) and "
                f"B ({module.out_features}, rank). Given: {tuple(a.shape)} and {tuple(b.shape)}."
            )
        return LowRankTerm(a, b, scaling(self.config, layer, a.shape[0]))

    def remove(self) -> None:
        """Take the adapter off: the layers compute with the base alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def scaling(config: Any, layer: str, rank: int) -> float:
    """Return the factor of the low-rank term: α / rank, or α / √rank for rank-stabilised LoRA.

    Args:
        config: the policy's PEFT config.
        layer: name of the adapted layer, which `alpha_pattern` may give an α of its own.
        rank: of its factors.

    >>> from peft import LoraConfig
    >>> scaling(LoraConfig(r=4, lora_alpha=8), "q_proj", 4)
    2.0
    """
    from peft.utils.other import get_pattern_key

    patterns = getattr(config, "alpha_pattern", None) or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config.lora_alpha)
    return alpha / (math.sqrt(rank) if getattr(config, "use_rslora", False) else rank)
