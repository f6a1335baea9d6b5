"""An engine's end, on stand-ins; that whole engines leave nothing in memory: test_engine.py."""

import sys
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm import shutdown as module


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize("dies", [True, False])
def test_everything_is_given_up_in_order_even_by_an_engine_that_died(owns, dies, monkeypatch, caplog):
    story, model = [], torch.nn.Linear(2, 2)
    runner = SimpleNamespace(get_model=lambda: model, kv_caches=[torch.zeros(2), [torch.zeros(2)]])

    def stop():
        story.append("engine")
        if dies:
            raise RuntimeError("no answer")

    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(shutdown=stop),
        _finalizer=lambda: story.append("finalizer"),
        model_executor=SimpleNamespace(driver_worker=worker),
    )
    state = SimpleNamespace(
        cleanup_dist_env_and_memory=lambda: story.append("process group"),
        destroy_model_parallel=lambda: story.append("model parallel groups"),
    )
    reload = SimpleNamespace(layerwise=SimpleNamespace(LAYERWISE_INFO={model: "kept"}))
    for name, stand_in in {
        "vllm": SimpleNamespace(),
        "vllm.distributed": SimpleNamespace(parallel_state=state),
        "vllm.model_executor.model_loader.reload": reload,
    }.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(module, "hold_pools", lambda: story.append("pools"))
    monkeypatch.setattr(module, "forget_graph_pool", lambda: story.append("graph pool"))
    module.shutdown(SimpleNamespace(llm_engine=engine), owns_process_group=owns)
    last = "process group" if owns else "model parallel groups"
    assert story == ["pools", "engine", "finalizer", "graph pool", last]
    assert reload.layerwise.LAYERWISE_INFO == {}
    assert ("RuntimeError: no answer" in caplog.text) == dies
