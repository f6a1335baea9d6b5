"""The experts that vLLM's tokens took, replayed in the learner: the same in every token, and the same log-probs."""

import copy
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_qrl.callbacks import AIS, RouterReplay
from lit_qrl.loop.turns import Conversations
from lit_qrl.network.routing import Routing, differing
from lit_qrl.rollout.vllm import requests
from lit_qrl.types import SamplingParams
from tests.rollout.test_vllm_experts import EXPERTS, mixture
from tests.rollout.test_vllm_runs import build_run, table
from tests.rollout.vllm.test_requests import Counting
from tests.routes import MOE
from tests.tiny_run import model_folder
from tests.vllm_engines import COMPLETION_LIMIT, VOCABULARY, prompts, publish

pytestmark = pytest.mark.vllm

LAYERS = 2


@torch.no_grad()
def replayed(network, tokens, routes):
    """Log-probs after the first token under the routes, and where the learner's own routers would go elsewhere."""
    ids = torch.tensor([tokens])
    with Routing(network, routes) as routing:
        logits = network(input_ids=ids).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs, differing(routing.own, routes)[:-1]


class InDoubles(TorchDispatchMode):
    """Computes in fp64 what a model's code does in fp32 whatever its weights are in: norms, routers, turned angles."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def raised(one):
            return torch.float64 if one is torch.float32 else one

        return func(*map(raised, args), **{name: raised(one) for name, one in (kwargs or {}).items()})


def rounding_of_both(network, exact, prompt, one):
    """How far the learner's and the sampler's log-probs, both in fp32, are from those of fp64 under the same routes."""
    ids = torch.tensor([[*prompt, *one.token_ids]])
    with torch.no_grad(), InDoubles(), Routing(exact, one.routed_experts):
        logprobs = exact(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert logprobs.dtype == torch.float64
    expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
    learner = replayed(network, ids[0].tolist(), one.routed_experts)[0][len(prompt) - 1 :]
    return [float((side - expected).abs().max()) for side in (learner, torch.tensor(one.logprobs))]


def check(network, prompt, one, bound):
    """The completion's log-probs are the learner's under its routes; returns the largest |log-ratio|, and which tokens
    the learner would send elsewhere.
    """
    routes, tokens = one.routed_experts, [*prompt, *one.token_ids]
    assert routes.shape == (len(tokens), LAYERS, 2)
    assert (routes[:-1] < EXPERTS).all()
    assert (routes[-1] == 255).all()
    logprobs, elsewhere = replayed(network, tokens, routes)
    drawn = torch.tensor(one.drawn if one.drawn is not None else [True] * len(one.token_ids))
    difference = (logprobs[len(prompt) - 1 :] - torch.tensor(one.logprobs))[drawn].abs().max()
    assert difference < bound
    return float(difference), elsewhere


def drawing_unseeded(drawing, sampling, seed, kept=False):
    return drawing(sampling, None, kept)


@pytest.mark.parametrize(("family", "pieces"), [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", True)])
def test_learner_is_sampler_under_the_samplers_routes(family, pieces, margin, built, monkeypatch):
    """With n > 1 and prompts that share their beginning, so that most of it comes from the prefix cache."""
    network = mixture(family)
    in_pieces = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    options = {"engine_args": in_pieces} if pieces else {}
    if pieces:  # after which vLLM cannot rewind a request's own generator on a CPU
        monkeypatch.setattr(requests, "drawing", partial(drawing_unseeded, requests.drawing))
    engine = built(network, spec={"routes": True}, **options)
    shared = prompts(1, 130)[0]
    asked = [[*shared, 5, 6], [*shared, 7], *prompts(3, 140, seed=1), shared[:3]]
    assert publish(network, engine, None, 0)[0] == []
    furthest = []
    for drawn in (engine.generate(asked, 3, seed=3), engine.generate(asked, 3, seed=4)):  # again, all cached
        for index, one in enumerate(drawn):
            difference, elsewhere = check(network, asked[index // 3], one, 5e-6)
            assert not elsewhere.any()
            furthest.append(difference)
    margin("replayed through vLLM, |log-ratio| at most", f"{max(furthest):.1e} ({family}, {pieces=})")
    exact = copy.deepcopy(network).double()
    exact.set_experts_implementation("eager")  # no grouped GEMM takes fp64
    errors = [rounding_of_both(network, exact, asked[i // 3], one) for i, one in enumerate(drawn) if i % 6 == 0]
    learner, sampler = (max(side) for side in zip(*errors, strict=True))
    assert max(learner, sampler) < 4e-6
    assert 1 / 4 < learner / sampler < 4  # neither side computes something else
    margin("from fp64, learner and vLLM at most", f"{learner:.1e}, {sampler:.1e} ({family}, {pieces=})")


def test_turns_of_a_conversation_and_another_sampler(built):
    network = mixture()
    engine = built(network, dtype="bf16", spec={"routes": True})
    starts = prompts(4, 60)
    sampling = SamplingParams(max_tokens=COMPLETION_LIMIT, stop_token_ids=tuple(range(0, VOCABULARY, 6)))
    publish(network, engine, None, 0)
    with Conversations(Counting(), [{}] * 4, starts, lambda said: [7], str, COMPLETION_LIMIT, seed=3) as talks:
        engine.converse(talks, sampling)
    said = talks.completions()
    assert max(one.episode.turns for one in said) > 1
    elsewhere = torch.cat([check(network, prompt, one, 0.5)[1] for prompt, one in zip(starts, said, strict=True)])
    assert 0 < elsewhere.any(1).float().mean() < 0.2  # bf16 and fp32 routers differ in a few tokens


def test_a_run_replays_what_vllm_took(tmp_path):
    sizes = {**MOE, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
    model_folder(tmp_path / "model", gain=2, **sizes)
    callbacks = [RouterReplay(compare_every=1), AIS()]
    trainer, module, data, watch = build_run(tmp_path, callbacks=callbacks, format="auto", trainer={"max_epochs": 2})
    trainer.fit(module, data)
    assert max(watch.mismatch) < 1e-5
    for row in table(tmp_path / "run"):
        assert float(row["routing/differing_tokens"]) == 0
        assert float(row["routing/replayed_kl_k3"]) < 1e-10
        assert 1 <= float(row["routing/load_max"]) <= 4
