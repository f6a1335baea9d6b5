"""What the process of an engine is given, and gets back."""

import os
import random

import numpy
import pytest
import torch

from lit_qrl.rollout.vllm.process import kept_process_state, prepare_environment


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
    prepare_environment(deep_gemm=True, kv_cache_gib=3.2)

    assert os.environ["VLLM_USE_DEEP_GEMM_E8M0"] == "0"  # else scales are rounded to powers of two
    assert os.environ["VLLM_USE_DEEP_GEMM"] == "1"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize("seed", [None, 3])
def test_generators_and_threads_are_the_process_own_again(seed):
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    expected = random.random(), numpy.random.rand(), float(torch.rand(()))
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    set_num_threads = torch.set_num_threads
    with kept_process_state(seed):
        assert seed is None or torch.initial_seed() == seed
        random.random(), numpy.random.rand(), torch.manual_seed(9)
        torch.set_num_threads = print
    assert torch.set_num_threads is set_num_threads
    assert (random.random(), numpy.random.rand(), float(torch.rand(()))) == expected
