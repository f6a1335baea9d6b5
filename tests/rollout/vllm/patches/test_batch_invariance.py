import torch

from lit_qrl.rollout.vllm.patches.batch_invariance import PATCH, norm_of_the_sum


def test_a_norm_with_a_residual_is_the_norm_of_the_sum_and_returns_it():
    def original(input, weight, eps, residual=None):
        assert residual is None
        return input / (input.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    norm = norm_of_the_sum(original)
    x, y, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 2.0])
    out, total = norm(x, weight, 0.0, residual=y)
    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)
    assert total.tolist() == [[3.0, 4.0]]
    assert x.tolist() == [[1.0, 2.0]]
    torch.testing.assert_close(norm(x, weight, 0.0), torch.tensor([[1.0, 4.0]]) / 2.5**0.5)


def test_it_is_for_the_version_that_was_looked_at_on_a_gpu():
    assert PATCH.concerns((0, 26, 0), "cuda")
    assert not PATCH.concerns((0, 26, 0), "cpu")
    assert not PATCH.concerns((0, 32, 0), "cuda")
