"""On a CUDA device with vLLM: experts in every format that it has kernels for, verified, and routes recorded."""

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig

from lit_qrl.formats import support
from lit_qrl.network.routing import Routing, differing
from lit_qrl.publish.probe import Probe, learner_scores
from lit_qrl.receipts.ledger import PublishError
from tests import vllm_engines
from tests.vllm_engines import VOCABULARY, optimizer_step, prompts, sampler_format, tiny_network

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

EXPERTS, CHOSEN, LAYERS = 8, 2, 2
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_experts_per_tok": CHOSEN, "dtype": torch.bfloat16}
QWEN = {"num_experts": EXPERTS, "moe_intermediate_size": 256, "norm_topk_prob": True}
FORMATS = ["plain", *support.names_where(lambda row: "cuda" in row.vllm_experts)]
"""A format gets `vllm_experts` in `formats/support.py` when it passes here."""


def mixture(family="qwen3_moe"):
    if family == "mixtral":
        return tiny_network(MixtralConfig, num_local_experts=EXPERTS, **SIZES).cuda()
    return tiny_network(Qwen3MoeConfig, **QWEN, **SIZES).cuda()


def publish(*given, **more):
    """As every other, experts in the format too; what is refused has faults as well."""
    try:
        return vllm_engines.publish(*given, **more, everywhere=True)
    except PublishError as error:
        return error.faults, None, None


def probed(network, engine, format):
    probe = Probe(VOCABULARY, format is not None and format.quantizes_activations)
    return probe.compare(engine.score(probe.tokens), learner_scores(network, probe.tokens, format))


@pytest.mark.parametrize("start", ["eager", "graphs"])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_verified_and_faults_are_named(name, start, built):
    network, format = mixture(), sampler_format(name)
    options = {"enforce_eager": True} if start == "eager" else {"quick_start": True}
    engine = built(network, format, gpu_memory_utilization=0.1, kv_cache_gib=1.0, **options)
    layer = "model.layers.1.mlp.experts.{}.{}"
    kept = {}

    def keeping(stream):
        for key, tensor in stream:
            kept[key] = tensor.clone()
            yield key, tensor

    faults, sent, report = publish(network, engine, format, 0, wire=keeping)
    assert faults == []
    assert report.received.unread == []
    assert set(report.layers.values()) <= {name, "bf16"}
    assert probed(network, engine, format).passed
    for version, reload in enumerate((False, True), start=1):
        engine.live.learns_routes = not reload
        engine.live.routes = None if reload else engine.live.routes
        previous, before = sent.receipts(), dict(kept)
        optimizer_step(network, seed=version, learning_rate=0.02)
        frozen = [key for key in before if key.startswith(layer.format(3, ""))]
        stale = {key: before[key] for key in frozen if "shape" not in key and "global" not in key}

        def stays(stream, stale=stale):
            return ((key, stale.get(key, tensor)) for key, tensor in stream)

        faults, _, _ = publish(network, engine, format, 10 * version, previous, stays)
        assert {fault.name for fault in faults if fault.kind == "stale"} == set(stale)

        def lacks(stream):
            return (one for one in stream if layer.format(5, "down_proj") not in one[0])

        faults, _, _ = publish(network, engine, format, 20 * version, None, lacks)
        assert any("5.down_proj" in str(fault) for fault in faults)
        faults, sent, report = publish(network, engine, format, 30 * version, wire=keeping)
        assert faults == []
        assert probed(network, engine, format).passed
    torch.cuda.synchronize()


@pytest.mark.parametrize("start", ["eager", "graphs"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_experts_that_tokens_took_come_with_them(family, start, built):
    network = mixture(family)
    options = {"enforce_eager": True} if start == "eager" else {"quick_start": True}
    engine = built(network, None, gpu_memory_utilization=0.1, kv_cache_gib=1.0, spec={"routes": True}, **options)
    shared = prompts(1, 130)[0]
    asked = [[*shared, 5, 6], [*shared, 7], *prompts(3, 140, seed=1), shared[:3]]
    assert publish(network, engine, None, 0)[0] == []
    elsewhere, near, far = [], [], []
    for seed in (3, 4):  # again, from the prefix cache
        for index, one in enumerate(engine.generate(asked, 3, seed=seed)):
            tokens, routes = [*asked[index // 3], *one.token_ids], one.routed_experts
            assert routes.shape == (len(tokens), LAYERS, CHOSEN)
            assert (routes[:-1] < EXPERTS).all()
            assert (routes[-1] == 255).all()
            ids, first = torch.tensor([tokens], device="cuda"), len(asked[index // 3])
            for given, kept in ((routes.cuda(), near), (None, far)):
                with torch.no_grad(), Routing(network, given).applied() as routing:
                    logits = network(input_ids=ids).logits[0, first - 1 : -1].float()
                said = logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0].cpu()
                kept.append((said - torch.tensor(one.logprobs)).abs())
            elsewhere.append(differing(routing.own.cpu(), routes)[:-1].any(1))
    near, far, elsewhere = torch.cat(near), torch.cat(far), torch.cat(elsewhere).float().mean()
    print(f"{family} {start}: replayed {near.mean():.4f} free {far.mean():.4f} elsewhere {elsewhere:.4f}")
    assert elsewhere < 0.2  # bf16 on both sides
    assert near.mean() <= far.mean() + 1e-3
    assert near.mean() < 0.05
