import torch

from lit_qrl.rollout.vllm.patches import marlin_workspaces as module


def test_layers_share_lock_memory_over_reloads_and_it_is_reset(fake, monkeypatch):
    monkeypatch.setattr(module, "_made", {})

    def make(device, max_blocks_per_sm=1):
        return torch.zeros(4 * max_blocks_per_sm, dtype=torch.int)

    modules = [fake(name, marlin_make_workspace_new=make) for name in module._MODULES]
    for _ in range(2):
        module.PATCH.apply((0, 26, 0))
    device = torch.device("cpu")
    first = modules[0].marlin_make_workspace_new(device, 2)
    assert first.shape == (8,)
    assert all(one.marlin_make_workspace_new(device, 2) is first for one in modules)
    assert modules[0].marlin_make_workspace_new(device) is not first
    first.fill_(7)
    module.unlock()
    assert not first.any()
    module.forget()
    assert modules[0].marlin_make_workspace_new(device, 2) is not first


def test_it_is_for_vllm_before_it_kept_one_workspace():
    assert module.PATCH.concerns((0, 26, 0), "cuda")
    assert not module.PATCH.concerns((0, 32, 0), "cuda")
