"""A tiny mixture of experts, and choices of its experts."""

import torch
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
