import torch

from lit_qrl.optim.realized import realized_update


def plain(named, build):
    return build(named)


def test_bf16_weights_lose_what_is_smaller_than_half_their_spacing():
    def adamw(named):
        return torch.optim.AdamW(named, lr=1e-6, weight_decay=0.0)

    lost = realized_update(adamw, plain, torch.bfloat16)
    # Of normal weights of size 0.02 those below 2⁻¹² move, where half a step of bf16 is 10⁻⁶: one in a hundred.
    assert 0.005 < lost.projected < 0.03
    assert 0.005 < lost.moved < 0.03


def test_fp32_weights_lose_nothing():
    whole = realized_update(lambda named: torch.optim.AdamW(named, lr=1e-6), plain, torch.float32)
    assert whole == (1.0, 1.0)


def test_a_large_step_survives():
    found = realized_update(lambda named: torch.optim.SGD(named, lr=1e-2), plain, torch.bfloat16)
    assert found.projected > 0.95
