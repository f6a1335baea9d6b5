"""What the process of an engine is given, and gets back."""

import os
import random

import numpy
import pytest
import torch
from torch import distributed

from lit_qrl.rollout.vllm.process import kept_process_state, own_world, prepare_environment
from tests.default_dtype import bf16_default


def test_environment_keeps_what_the_user_set_and_the_published_scales(monkeypatch):
    expected = {
        "VLLM_USE_DEEP_GEMM_E8M0": "0",  # else scales are rounded to powers of two
        "VLLM_USE_DEEP_GEMM": "1",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name in expected:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    prepare_environment(deep_gemm=True, kv_cache_gib=3.2)
    expected |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert {name: os.environ.get(name) for name in expected} == expected


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


@pytest.mark.parametrize(("processes", "size"), [(2, 1), (4, 2)])
def test_those_of_one_engine_are_the_world_inside(tmp_path, processes, size):
    given = tmp_path / "meeting", processes, size
    torch.multiprocessing.start_processes(_inside, given, nprocs=processes, start_method="fork")


def _inside(rank, meeting, processes, size):
    os.environ["RANK"] = "user's"
    os.environ.pop("LOCAL_RANK", None)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", world_size=processes, rank=rank)
    alike = list(range(rank - rank % size, rank - rank % size + size))
    for _ in range(1 + alike[0]):  # one engine's more often than another's: nobody else is waited for
        with own_world(size) as group:
            assert (distributed.get_world_size(), distributed.get_rank()) == (size, rank % size)
            if size > 1:
                assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (str(rank % size), str(rank % size))
            assert distributed.group.WORLD.bound_device_id is None
            own, total = distributed.new_group(list(range(size))), torch.tensor(rank)
            distributed.all_reduce(total, group=own)
            assert int(total) == sum(alike)
            distributed.destroy_process_group(own)
        found = [None] * size
        distributed.all_gather_object(found, rank, group=group)  # outside, too
        assert found == alike
    assert (distributed.get_world_size(), os.environ["RANK"]) == (processes, "user's")
    assert "LOCAL_RANK" not in os.environ
    distributed.all_reduce(total := torch.ones(1))
    assert float(total) == processes
    distributed.destroy_process_group()


def test_an_engine_computes_its_scales_in_fp32_within_a_16_bit_validation_step():
    with bf16_default():
        with kept_process_state():
            assert torch.empty(1).dtype == torch.float32
        assert torch.empty(1).dtype == torch.bfloat16
