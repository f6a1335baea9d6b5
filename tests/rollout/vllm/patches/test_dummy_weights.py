import pytest
import torch

from lit_qrl.rollout.vllm.patches.dummy_weights import NUMBER, fill
from tests.vllm_engines import build_engine, sampler_format, tiny_network


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu],
)
def test_numbers_are_exact(dtype):
    tensor = torch.zeros(3, 2, dtype=dtype)
    fill(tensor, -1e-3, 1e-3, seed=1)
    assert tensor.float().unique().tolist() == [NUMBER]


def test_integers_are_zero_and_what_has_no_memory_is_left():
    tensor = torch.full((3,), 200, dtype=torch.uint8)
    fill(tensor)
    assert tensor.tolist() == [0, 0, 0]
    fill(torch.empty(2, device="meta"))


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["plain", "nvfp4", "fp8_row"])
def test_an_engine_starts_with_finite_weights_and_logits(name):
    format = sampler_format(name)
    engine = build_engine(tiny_network(), format)
    try:
        engine._start(format)
        weights = dict(engine.live.model.named_parameters())
        assert all(weight.float().isfinite().all() for weight in weights.values())
        embedding = next(weight for key, weight in weights.items() if "embed_tokens" in key)
        assert set(embedding.unique().tolist()) <= {0.0, NUMBER}  # vLLM's padding is 0
        engine._usable = True
        scores = engine.score([[5, 6, 7]])
        assert scores[0].isfinite().all()
    finally:
        engine.close()
