"""Experts of a whole engine: tests/rollout/test_vllm_known_faults.py."""

from types import SimpleNamespace

import torch

from lit_qrl.rollout.vllm.patches.stale_experts import PATCH, forget_kernels


class RoutedExperts(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.quant_method = SimpleNamespace(moe_kernel=kernel)


def test_kernels_of_experts_are_forgotten_and_no_others():
    other = torch.nn.Linear(2, 2)
    other.quant_method = SimpleNamespace(moe_kernel="kept")
    model = torch.nn.Sequential(RoutedExperts("old"), RoutedExperts(None), other)
    forget_kernels(model)
    assert [layer.quant_method.moe_kernel for layer in model] == [None, None, "kept"]


def test_it_is_for_the_cpu_build_after_0_26():
    assert PATCH.concerns((0, 32, 0), "cpu")
    assert not PATCH.concerns((0, 32, 0), "cuda")
    assert not PATCH.concerns((0, 26, 0), "cpu")
