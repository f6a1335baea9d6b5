"""Log-probs and ranks of drawn tokens in one pass, against fp64: interpreted, or compiled on a GPU."""

import pytest
import torch

from tests.triton_interpreter import run_interpreted


def compare_scores(device):
    from lit_qrl.rollout import drawn_triton

    generator = torch.Generator().manual_seed(0)
    for dtype, words in ((torch.float32, 300), (torch.bfloat16, 20_000)):
        scores = (4 * torch.randn(5, words, generator=generator)).to(dtype)
        scores[1, 7:] = float("-inf")  # whole parts without a word
        scores[2] = scores[2, 0]  # all equal
        tokens = torch.tensor([3, 6, words - 1, words // 2, 0])
        wide = torch.empty(5, words + 8, dtype=dtype, device=device)[:, :words].copy_(scores)
        for given in (scores.to(device), wide):
            logprobs, ranks = drawn_triton.scored(given, tokens.to(device))
            exact = scores.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(logprobs.cpu().double(), exact, rtol=1e-5, atol=1e-5)
            own = scores.gather(1, tokens[:, None])
            assert ranks.tolist() == (scores >= own).sum(1).tolist()
        alone = drawn_triton.scored(scores[3:4].to(device), tokens[3:4].to(device))[0]
        assert torch.equal(alone, logprobs[3:4])  # beside no other row
    scores[0, 5] = float("nan")
    assert drawn_triton.scored(scores.to(device), tokens.to(device))[0].isnan().tolist() == [True] + [False] * 4


@pytest.mark.vllm  # which brings Triton
def test_the_kernels_in_the_interpreter():
    run_interpreted(compare_scores)


@pytest.mark.gpu
def test_the_kernels_on_the_device():
    compare_scores(torch.device("cuda"))
