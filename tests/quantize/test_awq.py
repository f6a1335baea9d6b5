import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.quantize.awq import (
    InputStatistics,
    channel_scales,
    fold,
    reconstruction_loss,
    rounded,
    scale_columns,
    search,
)

FORMATS = {"nvfp4": {}, "mxfp4": {}, "nf4": {}, "int4_group": {"group_size": 32}}


def outlier_inputs(tokens=200, channels=64, dtype=torch.float32):
    """A few channels a hundred times larger than the rest, as language models have them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, channels, generator=generator, dtype=dtype)
    x[:, [3, 17, 40]] *= 100
    return x


def weights(*outs, channels=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(out, channels, generator=generator, dtype=dtype) * 0.02 for out in outs]


def statistics_of(*inputs):
    statistics = InputStatistics()
    for x in inputs:
        statistics.add(x)
    return statistics


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_loss_is_the_squared_error_of_the_outputs(name, alpha):
    format = formats.get(name, **FORMATS[name])
    x, parts = outlier_inputs(), weights(16, 8, 8)
    statistics = statistics_of(x[:120], x[120:])
    scales = channel_scales(statistics.magnitude, alpha)
    amax = max(float((w * scales).abs().max()) for w in parts)
    expected = 0.0
    for weight in parts:
        shared = torch.tensor(amax) if format.shares_amax else None
        made = format.dequantize(format.quantize(weight * scales, shared), torch.float64)
        for row in x.double():
            scaled_row = torch.tensor([float(v) / float(s) for v, s in zip(row, scales, strict=True)]).double()
            expected += float(((made @ scaled_row - weight.double() @ row) ** 2).sum())
    loss = reconstruction_loss(format, parts, statistics.gram, scales)
    assert loss == pytest.approx(expected / len(x), rel=1e-4)


def test_the_statistics_are_means_over_all_tokens():
    x = outlier_inputs(dtype=torch.float64)
    statistics = statistics_of(x[:50].view(5, 10, 64), x[50:])
    for channel in (0, 3, 63):
        assert float(statistics.magnitude[channel]) == pytest.approx(sum(abs(float(v)) for v in x[:, channel]) / len(x))
    expected = sum(float(a) * float(b) for a, b in zip(x[:, 3], x[:, 5], strict=True)) / len(x)
    assert float(statistics.gram[3, 5]) == pytest.approx(expected)


def test_scales_are_powers_of_the_magnitude():
    magnitude = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)
    scales = channel_scales(magnitude, 0.5)
    assert (scales / scales[1]).tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert float(scales.amax() * scales.amin()) == pytest.approx(1.0)
    assert torch.equal(channel_scales(magnitude, 0.0), torch.ones(3, dtype=torch.float64))
    assert torch.isfinite(channel_scales(torch.tensor([0.0, 1.0]), 1.0)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_outliers_make_the_search_find_a_smaller_error(name):
    format = formats.get(name, **FORMATS[name])
    statistics = statistics_of(outlier_inputs())
    alpha, scales, loss, plain = search(format, [weights(32, 16)], statistics)
    assert alpha > 0
    assert loss < 0.7 * plain
    assert loss == reconstruction_loss(format, weights(32, 16), statistics.gram, scales)


@pytest.mark.parametrize("name", FORMATS)
def test_the_search_is_never_worse_than_plain_rounding(name):
    format = formats.get(name, **FORMATS[name])
    for seed in range(3):
        x = torch.randn(100, 64, generator=torch.Generator().manual_seed(seed))
        _, _, loss, plain = search(format, [weights(16)], statistics_of(x))
        assert loss <= plain
        assert plain == reconstruction_loss(format, weights(16), statistics_of(x).gram, torch.ones(64))


def test_alpha_zero_rounds_as_without_scaling():
    format = formats.get("nvfp4")
    parts = weights(16, 8)
    scaled = [scale_columns(weight, channel_scales(torch.rand(64) + 0.1, 0.0)) for weight in parts]
    for made, expected in zip(rounded(format, scaled), rounded(format, parts), strict=True):
        assert torch.equal(made, expected)


def test_fused_layers_share_their_scale_in_the_search():
    format = formats.get("nvfp4")
    small, large = weights(8)[0], weights(8)[0] * 50
    together, alone = rounded(format, [small, large])[0], rounded(format, [small])[0]
    assert not torch.equal(together, alone)


@pytest.mark.parametrize("bias", [False, True])
def test_folding_leaves_the_function_alone(bias):
    torch.manual_seed(0)
    scales = torch.rand(8, dtype=torch.float64) * 3 + 0.1
    norm = nn.LayerNorm(8, bias=bias).double()
    nn.init.normal_(norm.weight)
    readers = [nn.Linear(8, 4).double(), nn.Linear(8, 3).double()]
    x = torch.randn(5, 8, dtype=torch.float64)
    before = [reader(norm(x)).detach() for reader in readers]
    old = norm.weight.detach().clone()
    fold(norm, readers, scales)
    for reader, expected in zip(readers, before, strict=True):
        torch.testing.assert_close(reader(norm(x)), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.weight.detach(), old / scales, rtol=1e-12, atol=0)

    up, down = nn.Linear(6, 8, bias=bias).double(), nn.Linear(8, 2).double()
    y, gate = torch.randn(5, 6, dtype=torch.float64), torch.rand(5, 8, dtype=torch.float64)
    expected = down(gate * up(y)).detach()
    fold(up, [down], scales)
    torch.testing.assert_close(down(gate * up(y)), expected, rtol=1e-12, atol=1e-12)


def test_a_norm_in_bf16_decides_the_scale_that_the_columns_get():
    torch.manual_seed(0)
    norm, reader = nn.RMSNorm(64), nn.Linear(64, 4, bias=False)
    nn.init.uniform_(norm.weight, 0.5, 2)
    norm.weight.data[5] = 0.0
    norm.bfloat16()
    before = norm.weight.detach().double() * reader.weight.detach().double()
    fold(norm, [reader], torch.rand(64) * 3 + 0.1)
    after = norm.weight.detach().double() * reader.weight.detach().double()
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0)  # without it: bf16's 4e-3
