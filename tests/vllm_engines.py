"""A tiny policy, engines on it, and publishes as the trainer makes them, for the tests that run vLLM."""

from functools import partial
from types import SimpleNamespace

import torch

from lit_qrl import formats
from lit_qrl.network.adapters import merged_weights
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.precision.source import WeightSource, unchanged
from lit_qrl.publish.probe import computing_as
from lit_qrl.receipts import ledger
from lit_qrl.types import SamplingParams
from tests.cpu_kernels import skip_without_kernel
from tests.networks import build_network

FORMATS = ["plain", "fp8_tensor", "fp8_row", "fp8_block", "int8_channel", "int4_group", "nvfp4"]
"""All that the CPU build multiplies."""
VOCABULARY = 512
LEARNING_RATE = 4e-5  # the quickstart's
PROMPT_LIMIT, COMPLETION_LIMIT = 160, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
tiny_network = partial(build_network, gain=1, bias=0.1, **SIZES)


def sampler_format(name):
    """The format as vLLM computes it: per-token activation scales beside a weight scale per tensor."""
    if name == "plain":
        return None
    options = {"int4_group": {"group_size": 32}, "fp8_tensor": {"activations": "token"}}
    return formats.get(name, **options.get(name, {}))


def build_engine(network, format=None, lora=None, refusable=True, spec=None, **options):
    """An engine whose weights are still to come; skips the test where vLLM has no kernel, if that is `refusable`."""
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.rollout.vllm.engine import VLLMEngine
    from tests import vllm_cpu_shim

    if refusable:
        skip_without_kernel(format)
    if not torch.cuda.is_available():
        vllm_cpu_shim.install()
    engine = VLLMEngine(**{"max_num_seqs": 32, **options})
    usual = {"sampling": SamplingParams(max_tokens=COMPLETION_LIMIT, ignore_stop=True), "prompt_limit": PROMPT_LIMIT}
    spec = SamplerSpec(**{"format": format, "adapter": lora, **usual, **(spec or {})})
    if refusable:
        engine.validate(spec)
    engine.setup(spec, SimpleNamespace(network=network))
    return engine


def optimizer_step(network, seed=0, learning_rate=LEARNING_RATE):
    """One AdamW step on random gradients: every weight moves by the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
    torch.optim.AdamW(network.parameters(), lr=learning_rate).step()
    network.zero_grad()


def weights_of(network, format=None, dtype=None, exclude=(), head=False):
    """The stream that the publisher makes of a network."""
    policy = SimpleNamespace(network=network, named_weights=lambda: merged_weights(network))
    return WeightSource(policy, format, exclude, head).whole(unchanged, dtype)


def checkpoint(network, engine, format):
    return weights_of(network, format, engine.plain_dtype, engine.spec.exclude, engine.spec.quantize_head)


def publish(network, engine, format, version, previous=None, wire=lambda stream: stream, everywhere=False):
    """Publish and verify; return the faults, the sender's ledger and the report. `wire` may corrupt the stream."""
    layers = quantizable_linears(network, engine.spec.exclude, engine.spec.quantize_head)
    shapes = {name: tuple(linear.weight.shape) for name, linear in layers.items()}
    names = list(shapes) if everywhere else ledger.choose(list(shapes), version)
    sent = ledger.SentLedger(version, format, {name: shapes[name] for name in names})
    stream = engine.arranged(checkpoint(network, engine, format))
    report = engine.load_weights(wire(sent.watch(stream)), format, version)
    faults = ledger.compare(sent, report.received, previous)
    faults += ledger.compare_columns(sent, engine.read_columns, exact=format is None)
    names = list(sent.receipts())
    if hasattr(engine, "read_receipts"):
        faults += ledger.compare_receipts(sent, engine.read_receipts(names))
    else:
        faults += ledger.compare_receipts(sent, ledger.read_receipts(engine.read_back, names))
    return faults, sent, report


def one_step_behind(network, engine, format):
    """Yield what publishes, takes an optimizer step that is not published, and returns the state; end with a clean one.

    The engine has had one publish, of version 0.
    """
    version = 0

    def one_step_later():
        nonlocal version
        faults, sent, _ = publish(network, engine, format, version)
        assert faults == []
        old = {name: tensor.clone() for name, tensor in checkpoint(network, engine, format)}
        optimizer_step(network, seed=version)
        version += 1
        return SimpleNamespace(
            network=network, engine=engine, format=format, version=version, old=old, previous=sent.receipts()
        )

    yield one_step_later
    faults, _, _ = publish(network, engine, format, version + 1)
    assert faults == []
    assert disagreement(network, engine, format) < 0.03
    engine.close()


def named(faults):
    return {(fault.kind, fault.name) for fault in faults}


def gemm_shares(sent, engine, format):
    """By sampled layer: the largest distance of the engine's GEMM from what was sent, as a share of its bound."""
    return {
        layer: float(ledger.share_of_bound(engine.read_columns(layer, columns), weight, exact=format is None).max())
        for layer, (columns, weight) in sent.columns.items()
    }


def prompts(count=4, length=140, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length + i,), generator=generator).tolist() for i in range(count)]


@torch.no_grad()
def reference_logprobs(network, prompt, completion, format=None, dtype=torch.float32, temperature=1.0, head=False):
    """The log-probs of a completion under the learner computing in the sampler's format."""
    ids = torch.tensor([[*prompt, *completion]])
    with computing_as(network, format, dtype=dtype, head=head):
        logits = network(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def disagreement(network, engine, format=None, temperature=1.0, n=1, **generation):
    """Mean |Δ log p| between what the engine reports for its completions and the reference."""
    asked = prompts()
    differences = []
    for i, completion in enumerate(engine.generate(asked, n, seed=7, **generation)):
        expected = reference_logprobs(
            network,
            asked[i // n],
            completion.token_ids,
            format,
            engine.plain_dtype,
            temperature,
            engine.spec.quantize_head,
        )
        differences.append((torch.tensor(completion.logprobs) - expected).abs())
    return float(torch.cat(differences).mean())
