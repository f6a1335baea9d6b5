"""A start of vLLM that fails, early or late, leaves the process as it was, and another engine starts in it."""

import weakref

import pytest
import torch

from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm import process as vllm_start
from tests.vllm_engines import build_engine, disagreement, publish, tiny_network

WHERE = {
    "before any process group": ("vllm.v1.worker.cpu_worker", "CPUWorker.init_device"),
    "between two process groups": ("vllm.distributed.parallel_state", "ensure_model_parallel_initialized"),
    "while the model is made": ("vllm.model_executor.model_loader.dummy_loader", "DummyModelLoader.load_weights"),
    "while the cache is made": ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_kv_cache"),
}


def state():
    process = torch.get_num_threads(), torch.get_default_dtype(), torch.set_num_threads, torch.is_grad_enabled()
    return torch.distributed.is_initialized(), process


@pytest.mark.parametrize(
    ("quick_start", "steps", "compiles"),
    [("auto", 0, False), ("auto", 49_999, False), ("auto", 50_000, True), (True, 10**6, False), (False, 0, True)],
)
def test_a_run_that_is_long_enough_compiles(quick_start, steps, compiles, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ("compilation_config" not in vllm_start.compilation(quick_start, steps)) is compiles
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vllm_start.compilation(quick_start, steps) == {}


class Held:
    """Stands for the memory of an engine that is being built."""


def failing(held):
    def fail(*args, **options):
        mine = Held()
        held.append(weakref.ref(mine))
        raise RuntimeError("it cannot start")

    return fail


@pytest.mark.vllm
@pytest.mark.parametrize("where", WHERE)
def test_a_failed_start_leaves_the_process_as_it_was(where, monkeypatch, built):
    module, name = WHERE[where]
    network, held = tiny_network(), []
    engine = built(network)
    before, generator = state(), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{name}", failing(held))
        if name == "ensure_model_parallel_initialized":
            patch.setattr(f"vllm.v1.worker.gpu_worker.{name}", failing(held))
        with pytest.raises(RuntimeError, match="it cannot start"):
            publish(network, engine, None, 0)
    assert state() == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert [one() for one in held] == [None]
    assert engine.llm is None
    assert publish(network, engine, None, 1)[0] == []
    assert disagreement(network, engine) < 1e-4
    engine.close()
    with monkeypatch.context() as patch:  # an engine that once ran died when it does not start again
        patch.setattr(f"{module}.{name}", failing(held))
        if name == "ensure_model_parallel_initialized":
            patch.setattr(f"vllm.v1.worker.gpu_worker.{name}", failing(held))
        with pytest.raises(EngineDiedError, match="did not start again: RuntimeError: it cannot start"):
            publish(network, engine, None, 2)


@pytest.mark.vllm
def test_a_group_that_was_there_before_stays(monkeypatch, tmp_path):
    network = tiny_network()
    engine = build_engine(network)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("vllm.v1.worker.gpu_model_runner.GPUModelRunner.initialize_kv_cache", failing([]))
            with pytest.raises(RuntimeError, match="it cannot start"):
                publish(network, engine, None, 0)
        assert torch.distributed.is_initialized()
        torch.distributed.barrier()
        assert publish(network, engine, None, 1)[0] == []
        engine.close()
    finally:
        vllm_start.leave_groups(owns_process_group=True)
    assert not torch.distributed.is_initialized()
