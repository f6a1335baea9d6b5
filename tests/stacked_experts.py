"""What several tests ask of stacked experts: their matrices by hand, and models whose weights were rounded by hand."""

import copy

import torch

from lit_qrl.network.linears import fused_groups, quantizable_linears

TRANSPOSED, ALTERNATING = ("gpt_oss", "llama4_text"), ("gpt_oss",)


def by_hand(kind, gate_up, down):
    """Return gate, up and down "out in" of one expert as views, given its parts of the two stacked parameters."""
    if kind in TRANSPOSED:
        gate_up, down = gate_up.T, down.T
    half = len(gate_up) // 2
    gate, up = (gate_up[0::2], gate_up[1::2]) if kind in ALTERNATING else (gate_up[:half], gate_up[half:])
    return gate, up, down


def holders(network):
    """Return the modules that hold stacked experts, by name."""
    return {n: m for n, m in network.named_modules() if getattr(m, "down_proj", None) is not None and _stacked(m)}


def _stacked(module):
    return isinstance(module.down_proj, torch.nn.Parameter) and module.down_proj.ndim == 3


def values(format, weights):
    """Return what the codes of weights that share a scale stand for."""
    shared = (
        torch.stack([one.abs().max() for one in weights]).max() if format.shares_amax and len(weights) > 1 else None
    )
    return [format.dequantize(format.quantize(one.contiguous(), shared)) for one in weights]


@torch.no_grad()
def rounded(kind, network, format):
    """Return a copy of a model whose linear layers and experts hold what a weight-only format makes of them."""
    network = copy.deepcopy(network)
    linears = quantizable_linears(network)
    for names in fused_groups(linears).values():
        for name, value in zip(names, values(format, [linears[name].weight for name in names]), strict=True):
            linears[name].weight.copy_(value)
    for module in holders(network).values():
        for expert in range(len(module.down_proj)):
            gate, up, down = by_hand(kind, module.gate_up_proj[expert], module.down_proj[expert])
            for parts in ((gate, up), (down,)):
                for part, value in zip(parts, values(format, parts), strict=True):
                    part.copy_(value)
    return network
