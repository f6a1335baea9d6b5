"""The log-probs of the learner computing as the sampler should: in its format, with its adapter and its noise."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.adapters import merged_tensors
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.experts import ExpertStack, expert_stacks, experts_output
from lit_qrl.network.linears import fused_groups, quantizable_linears
from lit_qrl.network.modes import evaluating
from lit_qrl.network.names import base_of, checkpoint_modules, is_adapted
from lit_qrl.network.stream import shared_amax


@torch.no_grad()
def learner_scores(
    network: Any,
    tokens: Sequence[Sequence[int]],
    format: NumberFormat | None = None,
    exclude: Collection[str] = (),
    merged: bool = True,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Tensor] | None = None,
    jitter: float = 0.0,
    head: bool = False,
) -> list[Tensor]:
    """Return the log-probs (fp32, T = 1, "length − 1") of the learner computing with the sampler's weights.

    Args:
        network: the learner's Hugging Face model, adapters inside.
        tokens: sequences of one length.
        format: the sampler's number format; its GEMM is emulated, activations included.
        exclude: name patterns of layers that stay plain.
        merged: an adapter was merged before quantization; otherwise it stands beside the quantized base.
        dtype: what the weights were cast to before they were quantized (the engine's `plain_dtype`).
        overrides: published tensors that differ from the learner's own (perturbed norms), by parameter name.
        head: True when the output embedding is quantized too.
        jitter: relative error, of random sign, of what each decoder layer reads. Half the spacing of a dtype
            (2⁻⁸ for bf16) is what rounding there does, and so the least by which two implementations differ.
    """
    parameters = dict(network.named_parameters())
    kept = {name: parameters[name].data for name in overrides or {}}
    ids = torch.tensor([list(sequence) for sequence in tokens], device=next(network.parameters()).device)
    try:
        for name, tensor in (overrides or {}).items():
            parameters[name].data = tensor.to(kept[name])
        computing = computing_as(network, format, exclude, merged, dtype, head)
        with evaluating(network), computing, _jittered(network, jitter):
            logits = network(input_ids=ids, use_cache=False).logits[:, :-1].float()
    finally:
        for name, data in kept.items():
            parameters[name].data = data
    scores = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return list(scores.cpu())


@contextmanager
def _jittered(network: Any, size: float) -> Iterator[None]:
    """Multiply the inputs of all decoder layers by 1 ± `size`."""
    if size == 0:
        yield
        return
    generator = torch.Generator().manual_seed(0)

    def disturb(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = arguments[0]
        signs = 2.0 * torch.randint(2, hidden.shape, generator=generator).to(hidden.device) - 1.0
        return (hidden.float() * (1 + size * signs)).to(hidden), *arguments[1:]

    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def computing_as(
    network: nn.Module,
    format: NumberFormat | None,
    exclude: Collection[str] = (),
    merged: bool = True,
    dtype: torch.dtype | None = None,
    head: bool = False,
) -> Iterator[None]:
    """Make the quantizable layers compute in `format`, each quantizing its weight in passing: no copy is kept."""
    if format is None:
        yield
        return
    layers: dict[str, nn.Module] = dict(quantizable_linears(network, exclude, head))
    modules = {name: base_of(module) for name, module in checkpoint_modules(network)}
    stacks = {modules[name]: stack for name, stack in expert_stacks(network, exclude).items()}
    if merged:
        layers = {name: module for name, module in checkpoint_modules(network) if name in layers}
    try:
        for members in fused_groups(layers).values():
            group = {name: layers[name] for name in members}
            for name, module in group.items():
                module.forward = _forward(name, group, format, dtype)
        for module, stack in stacks.items():
            module.forward = _experts_forward(stack, module, format, dtype)
        yield
    finally:
        for module in (*layers.values(), *stacks):
            del module.forward


def _forward(name: str, group: Mapping[str, nn.Module], format: NumberFormat, dtype: torch.dtype | None) -> Any:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shared = None
        if format.shares_amax and len(group) > 1:
            shared = shared_amax({key: _weight(module, dtype) for key, module in group.items()})
        module, x = group[name], autocast_input(x)
        return format.linear(x, format.quantize(_weight(module, dtype), shared), base_of(module).bias)

    return forward


def _experts_forward(stack: ExpertStack, module: Any, format: NumberFormat, dtype: torch.dtype | None) -> Any:
    def multiply(expert: int, matrix: str, rows: Tensor) -> list[Tensor]:
        one = module.get_parameter(matrix).detach()[expert].to(dtype)
        parts = dict(zip(stack.parts[matrix], stack.parts_of(matrix, one), strict=True))
        shared = shared_amax(parts) if format.shares_amax and len(parts) > 1 else None
        made = [format.quantize(part.contiguous(), shared) for part in parts.values()]
        return [format.linear(autocast_input(rows), q) for q in made]

    def forward(hidden: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return experts_output(stack, module, multiply, hidden, chosen, weights)

    return forward


def _weight(module: Any, dtype: torch.dtype | None) -> Tensor:
    return (merged_tensors(module)["weight"] if is_adapted(module) else module.weight.detach()).to(dtype)
