import torch

from lit_qrl.formats import numerics


def every_fp32_near_e4m3():
    """All midpoints between E4M3 numbers, their neighbours, and values over the whole range."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = table[torch.isfinite(table)].sort().values.unique()
    midpoints = (table[:-1] + table[1:]) / 2
    around = torch.cat([torch.nextafter(midpoints, torch.tensor(s)) for s in (-1e9, 1e9)])
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(20000, generator=generator) * 10 ** (torch.rand(20000, generator=generator) * 10 - 8)
    return torch.cat([table, midpoints, around, spread.clamp(-448, 448)])


def test_arithmetic_rounding_is_the_cast_saturates_and_keeps_nan():
    values = every_fp32_near_e4m3()
    assert values.numel() > numerics._CAST_BELOW
    assert torch.equal(numerics.round_e4m3(values), values.to(torch.float8_e4m3fn).float())
    assert torch.equal(numerics.round_e4m3(values[:100]), values[:100].to(torch.float8_e4m3fn).float())
    values = torch.zeros(numerics._CAST_BELOW + 1)
    values[7] = float("nan")
    assert torch.isnan(numerics.round_e4m3(values)).sum() == 1
    assert numerics.to_e4m3(torch.tensor([1e9, -1e9, 460.0])).float().tolist() == [448.0, -448.0, 448.0]


def test_a_bias_is_added_before_the_rounding():
    out, bias = torch.tensor([[1.0, 3.0]]), torch.tensor([2.0**-9, 0.5])
    below = torch.tensor([[2.0**-9, 0.0]])
    assert numerics.with_bias(out.clone(), None, torch.float32).tolist() == [[1.0, 3.0]]
    # 1 + 2⁻⁹ + 2⁻⁹ is halfway between two bf16 numbers' midpoint and the next; each alone rounds back to 1
    assert numerics.with_bias(out + 2 * below, bias, torch.bfloat16).tolist() == [[1.0078125, 3.5]]
    assert ((out + 2 * below).bfloat16() + bias.bfloat16()).tolist() == [[1.0, 3.5]]
