"""Segments grow unless the user has said otherwise; what other processes open does not lie in one that grows."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from lit_qrl.rollout import VLLMEngine
from lit_qrl.rollout.vllm.ways import DeviceMemory
from lit_qrl.run import torch_settings as allocator
from lit_qrl.run.torch_settings import NAMES, let_segments_grow


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_segments_grow_where_nothing_is_said(environment):
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    let_segments_grow()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_up_stays(environment, name):
    environment.setenv(name, "max_split_size_mb:512")
    let_segments_grow()
    assert {one: os.environ.get(one) for one in NAMES} == dict.fromkeys(NAMES) | {name: "max_split_size_mb:512"}


def test_commands_say_so_before_torch_is_imported(environment):
    said = (
        "import sys, lit_qrl.run.torch_settings as allocator\n"
        "allocator.let_segments_grow = lambda: (print('torch' in sys.modules), sys.exit(3))\n"
        "from lit_qrl.cli.main import main\n"
        "main(['fit', '--config', 'none.yaml'])"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "False\n"), done.stderr


def test_an_engine_of_several_processes_takes_segments_of_fixed_sizes(environment):
    said = []
    environment.setattr(allocator, "_settle", said.append)
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    VLLMEngine()
    assert not said
    VLLMEngine(tensor_parallel_size=2)
    assert said == ["max_split_size_mb:512,expandable_segments:False"]
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == said[0]
    let_segments_grow()  # as in a process that this one starts
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == said[0]


@pytest.mark.gpu
def test_memory_for_other_processes_does_not_grow_and_the_rest_does(environment):
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as child:
        assert child.apply(_grows) == [False, True, True]


def _grows():
    """Return of three tensors, the first and last made by turns, whether each lies in a segment that grows."""
    before = torch.empty(1 << 20, device="cuda")
    memory = DeviceMemory(0)
    memory.pack([("weight", before)])
    after = torch.empty(1 << 24, device="cuda")
    held = next(one[0] for one in memory._held if one is not None)
    return [_in_growing(one) for one in (held, before, after)]


def _in_growing(tensor):
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return segment["is_expandable"]
    raise AssertionError("no segment holds it")
