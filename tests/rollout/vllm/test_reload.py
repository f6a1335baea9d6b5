"""The bracket, on a stand-in for vLLM's reload; whole engines: test_fast_load.py."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.live_model import register_head_bias, reloading, same_kernel


def test_the_view_of_a_convolution_that_was_packed_elsewhere_follows(fake):
    for name in ("vllm", "vllm.model_executor"):
        fake(name)
    fake("vllm.config", set_current_vllm_config=lambda config: nullcontext())
    nothing = SimpleNamespace(initialize_layerwise_reload=id, finalize_layerwise_reload=lambda model, config: None)
    fake("vllm.model_executor.model_loader", reload=nothing)
    model = torch.nn.Module()
    model.mixer, model.other = torch.nn.Module(), torch.nn.Module()
    for mixer in (model.mixer, model.other):
        mixer.conv1d = torch.nn.Conv1d(3, 3, 4, groups=3)
        mixer.register_buffer("conv_weights", torch.zeros(3, 4))
    with torch.no_grad(), reloading(model, SimpleNamespace(model_config="closed")):
        model.mixer.conv1d._cpu_unpacked_conv_weight = sent = torch.randn(3, 4)
    assert torch.equal(model.mixer.conv_weights, sent)
    assert not model.other.conv_weights.any()


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 2))
        self.register_parameter("bias", None)

    def _register_bias(self):
        self.bias = torch.nn.Parameter(torch.empty(4))


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_has_its_bias_before_the_first_reload(bias):
    model = torch.nn.ModuleDict({"head": Head(), "norm": torch.nn.LayerNorm(2)})
    network = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Linear(2, 4, bias=bias))
    register_head_bias(model, network)
    kept = model["head"].bias
    assert (kept is not None) == bias
    register_head_bias(model, network)
    assert model["head"].bias is kept


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
