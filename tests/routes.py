"""A tiny mixture of experts, choices of its experts, and what one makes of them in plain loops."""

import torch
from torch.nn import functional as F
from transformers import Qwen3MoeConfig

from tests.networks import build_network

EXPERTS, CHOSEN, LAYERS = 8, 2, 2
MOE = {
    "config_class": Qwen3MoeConfig,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def build_mixture(**changes):
    return build_network(**{**MOE, **changes})


def random_routes(*shape, layers=LAYERS, experts=EXPERTS, chosen=CHOSEN, seed=0):
    """Routes "… layers k" in which a token's experts are distinct."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, layers, experts, generator=generator).topk(chosen).indices.to(torch.uint8)


def route_by_masks(network, routes):
    """Make the blocks of a Qwen3-MoE compute all experts, and count those of `routes` "n layers k" alone."""

    def forward(block, layer, hidden):
        x = hidden.flatten(0, 1)
        logits = F.linear(x, block.gate.weight)
        taken = torch.zeros_like(logits).scatter_(1, routes[:, layer].long(), 1.0)
        gates = logits.softmax(-1) * taken
        gates = gates / gates.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            gate, up = F.linear(x, block.experts.gate_up_proj[expert]).chunk(2, dim=-1)
            total = total + gates[:, expert, None] * F.linear(F.silu(gate) * up, block.experts.down_proj[expert])
        return total.view_as(hidden)

    for layer, decoder in enumerate(network.model.layers):
        decoder.mlp.forward = lambda hidden, block=decoder.mlp, layer=layer: forward(block, layer, hidden)
    return network
