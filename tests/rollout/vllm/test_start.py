"""A start of vLLM that fails, early or late, leaves the process as it was, and another engine starts in it."""

import os
import tempfile
import weakref
from pathlib import Path

import pytest
import torch

from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm import process as vllm_start
from tests.vllm_engines import build_engine, disagreement, publish, tiny_network

WORKER = "vllm.v1.worker"
RUNNER = f"{WORKER}.gpu_model_runner.GPUModelRunner.initialize_kv_cache"
GROUPS = "ensure_model_parallel_initialized"
WHERE = {
    "before any process group": [f"{WORKER}.cpu_worker.CPUWorker.init_device"],
    "between two process groups": [f"vllm.distributed.parallel_state.{GROUPS}", f"{WORKER}.gpu_worker.{GROUPS}"],
    "while the model is made": ["vllm.model_executor.model_loader.dummy_loader.DummyModelLoader.load_weights"],
    "while the cache is made": [RUNNER],
}


def state():
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob("lit-qrl-vllm-*")}
    process = torch.get_num_threads(), torch.get_default_dtype(), torch.set_num_threads, torch.is_grad_enabled()
    return dict(os.environ), folders, torch.distributed.is_initialized(), sorted(vllm_start._groups()), process


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
def test_a_failed_start_leaves_the_process_as_it_was(where, monkeypatch, tmp_path, built):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other processes have folders in the usual one
    network, held, places = tiny_network(), [], WHERE[where]
    engine = built(network)
    before, generator = state(), torch.get_rng_state()
    with monkeypatch.context() as patch:
        for place in places:
            patch.setattr(place, failing(held))
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
        for place in places:
            patch.setattr(place, failing(held))
        with pytest.raises(EngineDiedError, match="did not start again: RuntimeError: it cannot start"):
            publish(network, engine, None, 2)


@pytest.mark.vllm
def test_a_group_that_was_there_before_stays(monkeypatch, tmp_path):
    network = tiny_network()
    engine = build_engine(network)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(RUNNER, failing([]))
            with pytest.raises(RuntimeError, match="it cannot start"):
                publish(network, engine, None, 0)
        assert torch.distributed.is_initialized()
        assert vllm_start._groups() == {}
        torch.distributed.barrier()
        assert publish(network, engine, None, 1)[0] == []
        engine.close()
    finally:
        vllm_start._leave_groups({}, owns_process_group=True)
    assert not torch.distributed.is_initialized()


@pytest.mark.vllm
def test_an_engine_that_runs_is_left_alone(monkeypatch, built):
    network = tiny_network()
    first, second = built(network), built(network)
    publish(network, first, None, 0)
    groups = sorted(vllm_start._groups())
    with monkeypatch.context() as patch:
        patch.setattr(RUNNER, failing([]))
        with pytest.raises(RuntimeError, match="it cannot start"):
            publish(network, second, None, 0)
    assert sorted(vllm_start._groups()) == groups
    assert disagreement(network, first) < 1e-4


def raise_with_local(error):
    local = "still here"
    assert local
    raise error


def start_and_fail(removed):
    with vllm_start.undone_on_failure(lambda: removed.append(True)):
        os.environ["LIT_QRL_KEPT"], os.environ["LIT_QRL_NEW"] = "changed", "new"
        raise_with_local(ValueError("no"))


def test_environment_and_folder_come_back_and_what_the_caller_handles_stays(monkeypatch):
    monkeypatch.setenv("LIT_QRL_KEPT", "as it was")
    removed, handled, failed = [], KeyError(), None
    try:
        raise_with_local(handled)
    except KeyError:
        try:
            start_and_fail(removed)
        except ValueError as error:
            failed = error.__traceback__
    assert os.environ["LIT_QRL_KEPT"] == "as it was"
    assert "LIT_QRL_NEW" not in os.environ
    assert removed == [True]
    assert handled.__traceback__.tb_next.tb_frame.f_locals["local"] == "still here"
    assert failed.tb_next.tb_next.tb_frame.f_locals == {}
