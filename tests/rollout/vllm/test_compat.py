"""What differs between versions of vLLM, seen from outside; nothing here imports vLLM."""

import os

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm import compat as vllm_compat


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1+cpu", "0.32.0"])
def test_supported_versions_pass(install, version):
    install(version, cpu=True)
    assert vllm_compat.installed_version() == (tuple(int(part) for part in version[:6].split(".")), True)
    vllm_compat.check_installation()


@pytest.mark.parametrize("version", ["0.25.3", "0.33.0", "1.0.0"])
def test_unsupported_version_is_named(install, version):
    install(version, cpu=True)
    with pytest.raises(ConfigError, match=rf"not supported.*Given: {version}"):
        vllm_compat.check_installation()


def test_build_for_the_other_device_is_refused(install, monkeypatch):
    install("0.32.0", cpu=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CPU build, but this host has a GPU"):
        vllm_compat.check_installation()


def test_gpu_build_needs_a_gpu(install):
    install("0.32.0", cpu=False)
    with pytest.raises(ConfigError, match="built for CUDA, but this host has no GPU"):
        vllm_compat.check_installation()


def test_environment_keeps_what_the_user_set_and_the_published_scales(monkeypatch):
    for name in (
        "VLLM_USE_DEEP_GEMM_E8M0",
        "VLLM_USE_DEEP_GEMM",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    vllm_compat.prepare_environment(deep_gemm=True, kv_cache_gib=3.2)

    assert os.environ["VLLM_USE_DEEP_GEMM_E8M0"] == "0"  # else scales are rounded to powers of two
    assert os.environ["VLLM_USE_DEEP_GEMM"] == "1"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_lora_wrappers_are_out_of_the_way_inside_and_back_after():
    class LinearWithLoRA(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = torch.nn.Linear(2, 2)
            self.lora_a_stacked = ()

    model = torch.nn.Sequential(LinearWithLoRA(), torch.nn.Linear(2, 2))
    wrapper = model[0]
    with vllm_compat.without_adapters(model):
        assert model[0] is wrapper.base_layer
        assert {name for name, _ in model.named_parameters()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert model[0] is wrapper
