import math
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.patches.kept_tokens import PATCH
from lit_qrl.types import SamplingParams
from tests.vllm_engines import build_engine, prompts, publish, tiny_network


class Sampler:
    """Gathers as vLLM's does."""

    @staticmethod
    def gather_logprobs(logprobs, num_logprobs, token_ids):
        return logprobs.topk(num_logprobs, dim=-1).values, token_ids


def test_all_log_probs_are_those_of_the_words_that_were_left(fake):
    class Flat:
        def __init__(self):
            self.start_indices = []

    kind = type("Sampler", (Sampler,), {"gather_logprobs": staticmethod(Sampler.gather_logprobs)})
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        fake(name)
    fake("vllm.v1.sample.sampler", Sampler=kind)
    fake("vllm.logprobs", FlatLogprobs=Flat)
    for _ in range(2):
        PATCH.apply((0, 32, 0))
    logprobs = torch.tensor([[-1.0, -math.inf, -0.5, -math.inf], [-math.inf, 0.0, -math.inf, -math.inf]])
    gather = SimpleNamespace(sampler=kind()).sampler.gather_logprobs  # through an instance, as vLLM calls it
    found, _ = gather(logprobs, 4, None)
    assert found.tolist() == [[-0.5, -1.0], [0.0, -math.inf]]
    assert gather(logprobs, 1, None)[0].tolist() == [[-0.5], [0.0]]  # who asks for the likeliest alone
    assert gather(logprobs, 0, None)[0].shape == (2, 0)
    assert gather(logprobs[:0], 4, None)[0].shape == (0, 1)  # a step in which nothing is drawn


def test_a_static_method_is_changed_once(fake):
    kind = type("Sampler", (), {"gather_logprobs": staticmethod(lambda *given: given)})
    for name in ("vllm", "vllm.v1", "vllm.v1.sample"):
        fake(name)
    fake("vllm.v1.sample.sampler", Sampler=kind)
    fake("vllm.logprobs", FlatLogprobs=type("Flat", (), {"start_indices": []}))
    PATCH.apply((0, 32, 0))
    first = kind.gather_logprobs
    PATCH.apply((0, 32, 0))
    assert kind.gather_logprobs is first


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 7}, {"top_p": 0.8, "top_k": 50, "temperature": 1.3}])
def test_on_a_gpu_log_probs_are_those_over_the_kept_tokens(truncation, margin):
    network = tiny_network().cuda().bfloat16()
    sampling = SamplingParams(max_tokens=16, ignore_stop=True, **truncation)
    spec = {"kept": True, "sampling": sampling}
    engine = build_engine(network, spec=spec, quick_start=True, gpu_memory_utilization=0.05)
    asked, furthest = prompts(6, 60), 0.0
    try:
        publish(network, engine, None, 0)
        for prompt, one in zip(asked, engine.generate(asked, 1, seed=3), strict=True):
            with torch.no_grad():
                logits = network(input_ids=torch.tensor([[*prompt, *one.token_ids]]).cuda()).logits[0, :-1].float()
            scores = (logits[len(prompt) - 1 :] / sampling.temperature).cpu()
            for step, (token, logprob, kept) in enumerate(zip(one.token_ids, one.logprobs, one.kept, strict=True)):
                assert token in kept.tolist()
                assert (
                    1 <= len(kept) < 512
                )  # of `top_k` there may be more: logits in bf16 tie, and all of them are kept
                own = scores[step][token] - scores[step][kept.long()].logsumexp(0)
                furthest = max(furthest, abs(float(own) - logprob))
        assert furthest < 0.1
        assert (
            engine.generate(asked[:2], 1, seed=3, sampling=SamplingParams(max_tokens=4, temperature=0))[0].kept is None
        )
        assert len(engine.score(asked[:2])) == 2
    finally:
        engine.close()
    margin(f"kept through vLLM on a GPU ({truncation}), |log-ratio| at most", f"{furthest:.1e}")
