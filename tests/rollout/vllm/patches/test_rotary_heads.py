import pytest
import torch

from lit_qrl.rollout.vllm.patches import rotary_heads
from lit_qrl.rollout.vllm.patches.patch import find

pytestmark = pytest.mark.vllm


def turned(x, positions, base=10000.0):
    """Pairs of neighbours turned by position · base^(−2i/dim), entry by entry."""
    dim = x.shape[-1]
    angle = positions[:, None].double() * base ** (-torch.arange(0, dim, 2).double() / dim)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], dim // 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)


def test_queries_with_their_heads_apart_are_turned_right():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    owner, name = find("vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu")
    method = getattr(owner, name)
    original = getattr(method, "lit_qrl_original", method)
    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_theta": 10000.0, "rope_type": "default"}
        rotary = get_rope(32, 64, is_neox_style=False, rope_parameters=parameters, dtype=torch.float32)
    positions = torch.arange(6)
    query, key = torch.randn(6, 4, 32), torch.randn(6, 1, 32)
    expected = turned(query, positions), turned(key, positions)
    wrong, _ = original(rotary, positions, query.clone(), key.clone())
    assert (wrong - expected[0]).abs().max() > 1  # vLLM's fault
    got = rotary_heads.by_head(original)(rotary, positions, query.clone(), key.clone())
    assert all(torch.allclose(one.double(), want, atol=1e-5) for one, want in zip(got, expected, strict=True))
    flat, _ = rotary_heads.by_head(original)(
        rotary, positions, query.reshape(6, -1).clone(), key.reshape(6, -1).clone()
    )
    assert torch.allclose(flat.view(6, 4, 32).double(), expected[0], atol=1e-5)
