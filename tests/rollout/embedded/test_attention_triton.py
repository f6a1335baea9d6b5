import pytest
import torch

from tests.triton_interpreter import everywhere


@everywhere
def test_attention(device):
    from lit_qrl.rollout.embedded import attention_triton

    generator = torch.Generator().manual_seed(0)
    for heads, key_heads, d, dim, n, dtype, tolerance in (
        (6, 2, 64, 64, 300, torch.float32, 1e-5),
        (7, 1, 16, 16, 40, torch.float32, 1e-5),
        (4, 2, 24, 8, 70, torch.float32, 1e-5),  # no powers of two
        (34, 2, 32, 32, 90, torch.float16, 2e-3),  # more heads than a tile has rows
    ):
        last = torch.tensor([0, n - 1, min(n - 2, 255), min(n - 1, 256)])
        query = torch.randn(4, 1, heads, d, generator=generator).to(dtype).transpose(1, 2)[:, :, 0]
        keys = torch.randn(4, key_heads, n, d, generator=generator).to(dtype)
        values = torch.randn(4, key_heads, n, dim, generator=generator).to(dtype)
        # What lies behind a row's end is not read: it may be anything.
        for row, column in enumerate(last.tolist()):
            keys[row, :, column + 1 :], values[row, :, column + 1 :] = torch.nan, torch.nan
        on = [one.to(device) for one in (query, keys, values, last)]
        found = attention_triton.attend(*on, scale=0.3)
        assert found.shape == (4, heads, dim)
        assert found.dtype == dtype
        with pytest.MonkeyPatch.context() as patch:  # rows enough to be read in one piece each
            patch.setattr(attention_triton, "BUSY", 4)
            torch.testing.assert_close(attention_triton.attend(*on, scale=0.3), found, atol=tolerance, rtol=0)
        for row, column in enumerate(last.tolist()):
            for head in range(heads):
                of = head // (heads // key_heads)
                k, v = (one[row, of, : column + 1].double() for one in (keys, values))
                shares = (k @ query[row, head].double() * 0.3).softmax(0)
                torch.testing.assert_close(found[row, head].double().cpu(), shares @ v, atol=tolerance, rtol=0)


@everywhere
def test_writing(device):
    from lit_qrl.rollout.embedded import attention_triton

    key = torch.randn(3, 1, 2, 24).transpose(1, 2)[:, :, 0]
    value = torch.randn(3, 2, 8)
    keys, values, last = torch.zeros(5, 2, 9, 24), torch.zeros(5, 2, 9, 8), torch.tensor([8, 0, 4])
    on = [one.to(device) for one in (key, value, keys, values, last)]
    attention_triton.write(on[0], on[1], on[2][:3], on[3][:3], on[4])
    for row, column in enumerate(last.tolist()):
        keys[row, :, column], values[row, :, column] = key[row], value[row]
    assert torch.equal(on[2].cpu(), keys)
    assert torch.equal(on[3].cpu(), values)
