"""What vLLM's batch-invariant mode asks for, on any host; the bits: tests/rollout/test_vllm_bits_gpu.py."""

import os

import pytest
import torch
from transformers import GPT2Config, Qwen3Config

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.structure import outline
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import invariant
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.networks import build_network


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(invariant, "_set", False)
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def hopper(monkeypatch):
    """A host with the GPU and the vLLM that have the mode."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(invariant, "installed_version", lambda: ((0, 26, 0), False))
    return monkeypatch


def asking(format=None, **options):
    """Validate such an engine, and do nothing else."""
    engine = VLLMEngine(batch_invariant=True, **options)
    return invariant.check(format, engine._arguments, engine.max_lora_rank)


def test_a_host_with_all_of_it_is_taken(hopper):
    asking()
    asking(formats.get("fp8_row"))
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    assert VLLMEngine(batch_invariant=True).batch_invariant
    assert not VLLMEngine().batch_invariant
    assert "VLLM_BATCH_INVARIANT" not in os.environ


@pytest.mark.parametrize(
    ("available", "capability", "version", "expected", "given"),
    [
        (False, (9, 0), (0, 26, 0), "compute capability 9.0", "no GPU"),
        (True, (8, 0), (0, 26, 0), "compute capability 9.0", r"\(8, 0\)"),
        (True, (10, 0), (0, 26, 1), "compute capability 9.0", r"\(10, 0\)"),
        (True, (9, 0), (0, 32, 0), "vLLM 0.26", "0.32.0"),
    ],
)
def test_a_gpu_or_a_vllm_without_its_kernels_is_refused(hopper, available, capability, version, expected, given):
    hopper.setattr(torch.cuda, "is_available", lambda: available)
    hopper.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    hopper.setattr(invariant, "installed_version", lambda: (version, False))
    with pytest.raises(ConfigError, match=f"Expected: {expected}.*Given: {given}.*batch_invariant to false"):
        asking()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": formats.get("int4_group")}, "Machete.*depends on the batch.*Given: int4_group"),
        ({"format": formats.get("nvfp4")}, "Marlin.*depends on the batch.*Given: nvfp4"),
        ({"format": formats.get("fp8_block")}, "kernel that was not tried.*Given: fp8_block"),
        ({"max_lora_rank": 8}, "max_lora_rank: 0.*Given: 8"),
        ({"engine_args": {"attention_backend": "FLASHINFER"}}, "attention_backend left out.*Given: .*FLASHINFER"),
        ({"engine_args": {"compilation_config": {"mode": 3}}}, "compilation_config left out"),
    ],
)
def test_kernels_that_are_not_invariant_are_refused_by_name(hopper, options, said):
    with pytest.raises(ConfigError, match=said):
        asking(**options)


def test_an_engine_refuses_before_a_weight_is_loaded_and_sets_nothing_unasked(monkeypatch):
    engine = VLLMEngine()
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    assert not engine.batch_invariant
    for check in ("check_installation", "check_operators"):
        monkeypatch.setattr(f"lit_qrl.rollout.vllm.engine.{check}", lambda *_: None)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="Given: no GPU"):
            VLLMEngine(batch_invariant=True).validate(SamplerSpec())


def test_models_and_dtypes_that_the_learner_cannot_follow_are_refused():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 64, "intermediate_size": 64}
    invariant.check_model(outline(Qwen3Config(**sizes, head_dim=128)))
    with pytest.raises(ConfigError, match=r"FlashAttention 3 was not seen.*64, 96, 128, 256 dimensions.*Given: 16"):
        invariant.check_model(outline(Qwen3Config(**sizes, head_dim=16)))
    network = build_network(head_dim=128)
    with pytest.raises(ConfigError, match=r"bf16.*Given: float32 and bfloat16"):
        invariant.check_model(network, torch.bfloat16)
    invariant.check_model(network.bfloat16(), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"kernels of vLLM.*llama, qwen2, qwen3.*Given: model_type gpt2"):
        invariant.check_model(outline(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64)))


@pytest.mark.parametrize("enabled", [True, False])
def test_what_the_mode_replaces_in_torch_is_put_back(monkeypatch, enabled):
    before = torch.bmm
    monkeypatch.setattr(torch, "bmm", before)  # undone at the end
    monkeypatch.setattr(invariant, "_keep_softmax_alone", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("NCCL_NTHREADS", "")
    monkeypatch.delenv("NCCL_NTHREADS")
    with invariant.learner_left_alone(enabled):
        torch.bmm = torch.mm
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_NTHREADS": "1", "VLLM_BATCH_INVARIANT": "1"}
    assert (torch.bmm is before) == enabled
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (":4096:8" if enabled else ":16:8")
    assert ("NCCL_NTHREADS" in os.environ) != enabled
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
