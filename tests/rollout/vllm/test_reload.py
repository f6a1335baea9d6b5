"""Kernels of experts over a reload, with stand-ins for vLLM's; whole engines: test_fast_load.py, tests/families."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.live_model import same_kernel


def experts_of(scale, alphas):
    weights = SimpleNamespace(scale=torch.nn.Parameter(torch.tensor(scale)), alpha_or_gscale=torch.tensor(alphas))
    config = SimpleNamespace(_w1=weights, _a1=SimpleNamespace(scale=None, dtype="fp8"), gemm1_alpha=None)
    return SimpleNamespace(moe_kernel=SimpleNamespace(config=config), moe_quant_config=config)


def test_experts_that_are_packed_again_keep_their_kernel_and_what_it_reads():
    module = torch.nn.Module()
    module.quant_method = method = experts_of([1.0, 2.0], [3.0])
    kernel, scale, alphas = (
        method.moe_kernel,
        method.moe_quant_config._w1.scale,
        method.moe_quant_config._w1.alpha_or_gscale,
    )
    with same_kernel(module):
        vars(method).update(vars(experts_of([5.0, 6.0], [7.0])))
    assert method.moe_kernel is kernel
    assert method.moe_kernel.config is method.moe_quant_config
    assert scale.tolist() == [5.0, 6.0]
    assert alphas.tolist() == [7.0]


def test_scales_that_the_kernel_cannot_take_are_an_error():
    module = torch.nn.Module()
    module.quant_method = method = experts_of([1.0, 2.0], [3.0])
    with pytest.raises(RuntimeError, match=r"_w1.scale.: \(3,\)"), same_kernel(module):
        vars(method).update(vars(experts_of([5.0, 6.0, 7.0], [7.0])))
