import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.precision.layers import block_fp8
from lit_qrl.precision.unified_fp8 import UnifiedFP8


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch", "FP8 backend torch cannot run here: there is no CUDA.*emulate"),
        ("te", "FP8 backend te cannot run here: there is no CUDA.*emulate"),
        ("cuda", "auto, te, torch or emulate.*cuda"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_at_once(name, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=said):
        UnifiedFP8(backend=name)


def test_a_missing_transformer_engine_is_named(monkeypatch):
    monkeypatch.setattr(block_fp8, "_block_gemm_missing", lambda device: None)
    monkeypatch.setattr(block_fp8, "TE_REQUIREMENT", "transformer_engine_that_is_not_there>=2.10")
    with pytest.raises(ConfigError, match="transformer_engine_that_is_not_there"):
        UnifiedFP8(backend="te")
    assert block_fp8.backend("auto").name == "torch"


def test_scales_are_padded_to_what_the_gemm_of_transformer_engine_reads():
    scale = torch.arange(10.0).view(2, 5)
    padded = block_fp8._padded(scale)
    assert padded.shape == (2, 8)
    assert torch.equal(padded[:, :5], scale)
    assert padded.is_contiguous()
