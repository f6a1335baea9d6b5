import pytest

from lit_qrl.rollout.vllm.patches.model_inspection import PATCH


@pytest.mark.vllm
def test_a_model_is_inspected_in_this_process_as_in_another(monkeypatch):
    from vllm.model_executor.models import registry

    lazy = registry.ModelRegistry.models["Qwen3ForCausalLM"]
    ((symbol, change),) = PATCH.changes.items()
    assert symbol.endswith("inspect_model_cls")
    expected = registry._ModelInfo.from_model_cls(lazy.load_model_cls())
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: pytest.fail("a process was started"))
    found = change(None)(lazy)
    assert found == expected
    assert found.architecture == "Qwen3ForCausalLM"
    assert found.is_text_generation_model
