import pytest
import torch

from lit_qrl.rollout.vllm.patches import drawn_logprobs


def test_whatever_else_is_asked_for_is_left_to_vllm(monkeypatch):
    seen = []
    ours = drawn_logprobs._of_drawn_alone(lambda *given, **named: seen.append((given, named)))
    monkeypatch.setattr(drawn_logprobs, "_invariant", lambda: False)
    logits, tokens = torch.randn(2, 9), torch.tensor([1, 2])
    ours(logits, 0, tokens)  # on a CPU
    ours(logits, 3, tokens, None, max_per_req_token_ids=2)
    assert [given[1] for given, _ in seen] == [0, 3]
    assert seen[1][1] == {"max_per_req_token_ids": 2}
    on_gpu = type("OnGPU", (), {"device": torch.device("cuda"), "stride": lambda self, dim: (9, 1)[dim]})()
    for count, named in ((1, {}), (0, {"max_per_req_token_ids": 1}), (0, {"logits_mode": True})):
        ours(on_gpu, count, tokens, **named)
    ours(on_gpu, 0, tokens, torch.tensor([0, 1]))
    monkeypatch.setattr(drawn_logprobs, "_invariant", lambda: True)
    ours(on_gpu, 0, tokens, logits_mode=False)
    assert len(seen) == 7


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_those_of_vllm_s_kernels(dtype):
    from vllm.v1.worker.gpu.sample import logprob

    theirs = getattr(logprob.compute_topk_scores, "lit_qrl_original", logprob.compute_topk_scores)
    ours = drawn_logprobs._of_drawn_alone(lambda *given, **named: pytest.fail("vLLM's own"))
    logits = (3 * torch.randn(128, 152_064, device="cuda")).to(dtype)
    tokens = torch.randint(152_064, (128,), device="cuda")
    made = ours(logits, 0, tokens, [0, 1], max_per_req_token_ids=0, logits_mode=False)
    expected = theirs(logits, 0, tokens, [0, 1])
    assert [one.shape for one in made[:3]] == [one.shape for one in expected[:3]]
    assert [one.dtype for one in made[:3]] == [one.dtype for one in expected[:3]]
    torch.testing.assert_close(made.logprobs, expected.logprobs, rtol=1e-6, atol=2e-5)
    assert torch.equal(made.selected_token_ranks, expected.selected_token_ranks)
    assert torch.equal(made.logprob_token_ids, expected.logprob_token_ids)
    assert made.cu_num_generated_tokens == [0, 1]
