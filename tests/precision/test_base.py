import copy
import re

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from peft import LoraConfig
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats import numerics
from lit_qrl.precision import QATAligned
from lit_qrl.precision.base import check_shapes
from lit_qrl.precision.layers.low_bit import LowBitLinear
from lit_qrl.precision.qat import Aligned
from lit_qrl.precision.source import unchanged
from tests.precision.toy import LINEARS, configured


def aligned(linear, format):
    return LowBitLinear.from_linear(linear, "layer", Aligned(format))


def test_a_step_that_no_version_counter_sees_is_seen():
    layer, x = aligned(nn.Linear(64, 32), formats.get("fp8_row")), torch.randn(2, 64)
    before = layer(x)
    layer.weight.data.mul_(2.0)
    torch.optim.SGD([layer.bias]).step()
    assert not torch.equal(layer(x), before)


def test_a_validation_pass_first_does_not_poison_training():
    layer = aligned(nn.Linear(64, 32), formats.get("fp8_row"))
    x = torch.randn(2, 64)
    with torch.inference_mode():
        first = layer(x)
    layer(x).sum().backward()
    assert torch.equal(layer(x), first)


def test_what_cannot_be_converted_is_refused_and_what_is_no_policy_is_left():
    module = configured()
    module.critic = nn.Linear(64, 64)
    with pytest.raises(ConfigError, match=r"do not fit int4_group: model\.layers\.0\.self_attn\.q_proj \(64, 64\)"):
        QATAligned("int4_group").convert_module(module)
    with pytest.raises(ConfigError, match="No linear layer"):
        QATAligned("int4_group", exclude=["*_proj"]).convert_module(module)
    with pytest.raises(ConfigError, match=r"adapter.*NVFP4LoRA"):
        QATAligned("fp8_row").convert_module(configured(lora=LoraConfig(r=2, target_modules=["q_proj"])))
    QATAligned("fp8_row").convert_module(module)
    assert type(module.critic) is nn.Linear


def test_a_weight_that_became_nan_is_named():
    module = configured(QATAligned("fp8_tensor"))
    with torch.no_grad():
        module.policy.network.get_submodule(LINEARS[1]).weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=rf"{LINEARS[1]}\.weight: .*NaN"):
        module.policy(torch.arange(6).view(1, 6))


def test_a_weight_that_became_nan_is_named_before_a_step_or_publish_where_the_host_runs_ahead(monkeypatch):
    plugin = QATAligned("fp8_row")
    module = configured(plugin)
    steps = []
    monkeypatch.setattr(Precision, "optimizer_step", lambda self, *args, **options: steps.append(1))
    monkeypatch.setattr(numerics, "runs_ahead", lambda tensor: True)
    weight = module.policy.network.get_submodule(LINEARS[1]).weight
    held = weight.detach().clone()
    source = plugin.source(module.policy, plugin.format)
    for found, taken in ((lambda: list(source.whole(unchanged, None)), []), (plugin.optimizer_step, [1])):
        with torch.no_grad():
            weight[0, 0] = float("nan")
        module.policy(torch.arange(6).view(1, 6))
        with pytest.raises(ConfigError, match=rf"{LINEARS[1]}\.weight holds NaN or inf and cannot be quantized"):
            found()
        assert not steps
        with torch.no_grad():
            weight.copy_(held)
        module.policy(torch.arange(6).view(1, 6))
        found()
        assert steps == taken


def test_moving_or_copying_a_layer_drops_what_was_derived():
    layer = aligned(nn.Linear(64, 32), formats.get("int4_group", group_size=32))
    first = layer.quantized()
    assert layer.quantized() is first
    layer.to(torch.float64)
    assert layer.quantized() is not first
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert int(layer.format.dequantize(layer.quantized()).count_nonzero()) == 0
    assert int(copied.format.dequantize(copied.quantized()).count_nonzero()) > 0


def test_siblings_share_one_scale_and_follow_each_other_s_updates():
    module = configured(QATAligned("fp8_tensor"))
    q, k, v = (module.policy.network.get_submodule(f"model.layers.0.self_attn.{part}_proj") for part in "qkv")
    largest = max(float(layer.weight.detach().abs().max()) for layer in (q, k, v))
    for layer in (q, k, v):
        assert float(layer.quantized().scales.float().max()) == pytest.approx(largest / 448)
    with torch.no_grad():
        v.weight[0, 0] = 4 * largest
    assert float(q.quantized().scales.float().max()) == pytest.approx(4 * largest / 448)


@pytest.mark.parametrize(
    ("format", "remedy"), [("int4_group", "Choose a smaller group_size (32 or 64), exclude"), ("mxfp4", "Exclude")]
)
def test_groups_that_do_not_fit_may_be_smaller(format, remedy):
    with pytest.raises(
        ConfigError, match=rf"1 layer does not fit {format}.*{re.escape(remedy)} them with globs in the plugin"
    ):
        check_shapes(formats.get(format), {"layer": (64, 100)})


def test_a_second_plugin_takes_layers_over_whole():
    module, tokens = configured(), torch.zeros(1, 4, dtype=torch.long)
    for format in (formats.get("fp8_row"), formats.get("int4_group", group_size=32)):
        plugin = QATAligned(format)
        plugin.convert_module(module)
        module.policy(tokens)
        for layer in plugin.layers(module).values():
            assert layer.arithmetic is plugin.arithmetic
            assert layer.quantized().format == format
