"""What the process of an engine is given, and gets back."""

import os
import random

import numpy
import torch
from torch import distributed

from lit_qrl.rollout.vllm.process import kept_process_state, own_world, prepare_environment
from tests.default_dtype import bf16_default


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


def test_generators_and_threads_are_the_process_own_again():
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    expected = random.random(), numpy.random.rand(), float(torch.rand(()))
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    set_num_threads = torch.set_num_threads
    with kept_process_state():
        random.random(), numpy.random.rand(), torch.manual_seed(9)
        torch.set_num_threads = print
    assert torch.set_num_threads is set_num_threads
    assert (random.random(), numpy.random.rand(), float(torch.rand(()))) == expected


def test_a_process_of_several_is_alone_inside(tmp_path):
    torch.multiprocessing.start_processes(_alone, (tmp_path / "meeting",), nprocs=2, start_method="fork")


def test_two_of_four_processes_are_the_world_inside(tmp_path):
    torch.multiprocessing.start_processes(_pair, (tmp_path / "meeting",), nprocs=4, start_method="fork")


def _pair(rank, meeting):
    os.environ["RANK"] = "user's"
    os.environ.pop("LOCAL_RANK", None)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", world_size=4, rank=rank)
    with own_world(2) as group:
        assert (distributed.get_world_size(), distributed.get_rank()) == (2, rank % 2)
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (str(rank % 2), str(rank % 2))
        own = distributed.new_group([0, 1])
        total = torch.tensor(rank)
        distributed.all_reduce(total, group=own)
        assert int(total) == (1 if rank < 2 else 5)
    found = [None] * 2
    distributed.all_gather_object(found, rank, group=group)  # outside, too
    assert found == ([0, 1] if rank < 2 else [2, 3])
    assert (distributed.get_world_size(), os.environ["RANK"]) == (4, "user's")
    assert "LOCAL_RANK" not in os.environ
    distributed.destroy_process_group()


def _alone(rank, meeting):
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", world_size=2, rank=rank)
    for _ in range(1 + rank):  # one of them more often: nobody is waited for
        with own_world():
            assert (distributed.get_world_size(), distributed.get_rank()) == (1, 0)
            assert distributed.group.WORLD.bound_device_id is None
            own = distributed.new_group([0])
            total = torch.ones(1)
            distributed.all_reduce(total, group=own)
            assert float(total) == 1
        distributed.destroy_process_group(own)
    assert (distributed.get_world_size(), distributed.get_rank()) == (2, rank)
    distributed.all_reduce(total)
    assert float(total) == 2
    distributed.destroy_process_group()


def test_an_engine_computes_its_scales_in_fp32_within_a_16_bit_validation_step():
    with bf16_default():
        with kept_process_state():
            assert torch.empty(1).dtype == torch.float32
        assert torch.empty(1).dtype == torch.bfloat16
