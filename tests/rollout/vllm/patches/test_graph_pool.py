import pytest

from lit_qrl.rollout.vllm.patches.graph_pool import forget_graph_pool


@pytest.mark.vllm
def test_the_next_engine_captures_into_a_pool_of_its_own(monkeypatch):
    from vllm.platforms import current_platform

    platform = type(current_platform)
    monkeypatch.setattr(platform, "_global_graph_pool", (0, 7), raising=False)
    assert current_platform.get_global_graph_pool() == (0, 7)
    forget_graph_pool()
    monkeypatch.setattr(platform, "graph_pool_handle", lambda self: (0, 8), raising=False)
    assert current_platform.get_global_graph_pool() == (0, 8)
