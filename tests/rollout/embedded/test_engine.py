import types

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.routing import Routing, differing
from lit_qrl.network.structure import computed_buffers
from lit_qrl.receipts.ledger import Constants, Fault
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.embedded.sampling import truncate
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.types import SamplingParams
from tests.networks import build_network
from tests.routes import build_mixture
from tests.vllm_engines import weights_of

PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 3, 12], [10, 11]]
EOS = 1


def policy_of(network):
    return types.SimpleNamespace(network=network)


def publish(engine, network, format=None, version=0, change=lambda stream: stream):
    return engine.load_weights(change(weights_of(network, format)), format, version)


def engine_of(network, format=None, sampling=None, spec=(), **options):
    engine = TransformersEngine(**options)
    sampling = sampling or SamplingParams(max_tokens=12, stop_token_ids=(EOS,))
    engine.setup(SamplerSpec(sampling=sampling, **dict(spec)), policy_of(network))
    publish(engine, network, format)
    return engine


def full_forward(network, prompt, completion, temperature=1.0):
    """Log-softmax "t v" (fp64) at the completion's positions, from one forward over the whole sequence alone."""
    with torch.no_grad():
        logits = network(torch.tensor([list(prompt) + completion.token_ids])).logits[0].double()
    return (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]


def check_log_probs(network, prompts, completions, n, temperature=1.0, atol=1e-5):
    for index, completion in enumerate(completions):
        expected = full_forward(network, prompts[index // n], completion, temperature)
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        got = torch.tensor(completion.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, expected, atol=atol, rtol=1e-5)


def scored_apart(engine, completions, n):
    """Return how far log-probs are on average from those of whole sequences."""
    scores = engine.score([[*PROMPTS[i // n], *one.token_ids] for i, one in enumerate(completions)])
    off = [
        (score[len(PROMPTS[i // n]) - 1 :].cpu() - torch.tensor(one.logprobs)).abs()
        for i, (score, one) in enumerate(zip(scores, completions, strict=True))
    ]
    return float(torch.cat(off).mean())


@pytest.fixture(scope="module")
def network():
    return build_network()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_one_full_forward(network, temperature):
    engine = engine_of(network)
    sampling = SamplingParams(max_tokens=12, temperature=temperature, stop_token_ids=(EOS,))
    completions = engine.generate(PROMPTS, 6, seed=0, sampling=sampling)
    assert len(completions) == 24
    assert len({tuple(completion.token_ids) for completion in completions}) > 12
    check_log_probs(network, PROMPTS, completions, 6, temperature)


def test_a_row_stops_at_its_first_stop_token(network):
    completions = engine_of(network).generate(PROMPTS, 32, seed=3)
    for completion in completions:
        stopped = completion.token_ids[-1] == EOS
        assert EOS not in completion.token_ids[:-1]
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == 12
        assert len(completion.logprobs) == len(completion.token_ids)
    lengths = {len(completion.token_ids) for completion in completions}
    assert len(lengths) > 5


def test_ignoring_stop_tokens(network):
    sampling = SamplingParams(max_tokens=7, stop_token_ids=(EOS,), ignore_stop=True)
    completions = engine_of(network).generate(PROMPTS, 8, seed=0, sampling=sampling)
    assert {len(completion.token_ids) for completion in completions} == {7}
    assert any(EOS in completion.token_ids[:-1] for completion in completions)
    check_log_probs(network, PROMPTS, completions, 8)


def test_ended_rows_leave_the_batch(network, monkeypatch):
    engine = engine_of(network)
    widths = []
    base = engine.network.base_model
    forward = type(base).forward

    def watched(self, input_ids, **kwargs):
        widths.append(len(input_ids))
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(base), "forward", watched)
    completions = engine.generate(PROMPTS, 8, seed=3)
    alive = [sum(len(c.token_ids) > step for c in completions) for step in range(1, 12)]
    assert widths == [len(PROMPTS), *[rows for rows in alive if rows]]


def test_the_same_seed_gives_the_same_bits(network):
    first = engine_of(network).generate(PROMPTS, 5, seed=7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = engine_of(network).generate(PROMPTS, 5, seed=7)
    assert first == second
    assert torch.equal(state, torch.get_rng_state())  # the global generator is left alone
    assert first != engine_of(network).generate(PROMPTS, 5, seed=8)


@pytest.mark.parametrize("limit", [*({"max_batch": rows} for rows in (1, 3, 4, 9)), {"cache_gigabytes": 2e-5}])
def test_batches_of_any_size_draw_the_same_tokens(network, limit):
    whole = engine_of(network).generate(PROMPTS, 4, seed=2)
    cut = engine_of(network, **limit).generate(PROMPTS, 4, seed=2)
    assert [c.token_ids for c in cut] == [c.token_ids for c in whole]
    for left, right in zip(whole, cut, strict=True):
        torch.testing.assert_close(torch.tensor(left.logprobs), torch.tensor(right.logprobs), atol=1e-5, rtol=0)


def test_long_prompts_are_prefilled_in_parts(network, monkeypatch):
    whole = engine_of(network).generate(PROMPTS, 4, seed=2)
    monkeypatch.setattr("lit_qrl.rollout.embedded.decode.PREFILL_TOKENS", 6)
    parts = engine_of(network).generate(PROMPTS, 4, seed=2)
    assert [c.token_ids for c in parts] == [c.token_ids for c in whole]


@pytest.mark.parametrize("format", [None, "int4_group"])
def test_batch_invariant_log_probs_are_the_same_bits_alone_in_every_batch_and_in_scoring(network, format):
    engine = engine_of(network, format and formats.get(format, group_size=16), batch_invariant=True)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8], [9] * 11]
    whole = engine.generate(prompts, n=3, seed=5)
    alone = engine.generate(prompts[2:3], n=3, seed=5, positions=[2])
    assert [c.token_ids for c in alone] == [c.token_ids for c in whole[6:9]]
    assert [c.logprobs for c in alone] == [c.logprobs for c in whole[6:9]]
    sequences = [[*prompts[i // 3], *c.token_ids] for i, c in enumerate(whole)]
    for i, (scores, completion) in enumerate(zip(engine.score(sequences), whole, strict=True)):
        assert scores[len(prompts[i // 3]) - 1 :].tolist() == completion.logprobs


def test_a_format_with_one_scale_for_the_batch_cannot_be_batch_invariant(network):
    with pytest.raises(ConfigError, match="depend on the sequences beside it"):
        engine_of(network, formats.get("fp8_tensor"), batch_invariant=True)


def test_greedy_takes_the_likeliest_token(network):
    sampling = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(EOS,))
    completions = engine_of(network).generate(PROMPTS, 1, seed=0, sampling=sampling)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert full_forward(network, prompt, completion).argmax(-1).tolist() == completion.token_ids
    check_log_probs(network, PROMPTS, completions, 1)


def test_bf16_engine(network):
    half = build_network().bfloat16()
    engine = engine_of(network, dtype="bf16")
    completions = engine.generate(PROMPTS, 4, seed=0)
    assert next(engine.network.parameters()).dtype == torch.bfloat16
    # bf16 logits have a relative step of 2^-8; the two orders of accumulation differ by a few of them.
    check_log_probs(half, PROMPTS, completions, 4, atol=0.3)
    assert next(network.parameters()).dtype == torch.float32


@pytest.mark.parametrize("format", [None, formats.get("fp8_row")])
def test_a_buffer_that_no_publish_sends_is_looked_at_with_each(network, format):
    engine = TransformersEngine()
    engine.setup(SamplerSpec(), policy_of(network))
    assert publish(engine, network, format, 0).received.faults == []
    engine.score(PROMPTS)
    assert publish(engine, network, format, 1).received.faults == []
    engine.network.get_buffer("model.rotary_emb.inv_freq")[1] += 2**-20
    changed = [Fault("buffer", "model.rotary_emb.inv_freq")]
    for version in (2, 3):  # it is not forgotten
        assert publish(engine, network, format, version).received.faults == changed
    norm = {"model.norm.weight": network.model.norm.weight}
    assert engine.perturb(iter(norm.items()), 4).received.faults == changed


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_are_no_constants(kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16, **factors}
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=8, **shape, max_position_embeddings=16, rope_parameters=rope)
    follows = LlamaForCausalLM(config).eval()
    constants, before = Constants(lambda: computed_buffers(follows, True)), follows.model.rotary_emb.inv_freq.clone()
    follows(torch.ones(1, 40, dtype=torch.long))
    assert not torch.equal(follows.model.rotary_emb.inv_freq, before)
    assert constants.faults() == []


def test_unchanged_weights_are_shared_and_changed_ones_are_not():
    network = build_network()
    engine = engine_of(network)
    own = dict(engine.network.named_parameters())
    for name, parameter in network.named_parameters():
        assert own[name].data_ptr() == parameter.data_ptr()
    before = network.model.norm.weight.clone()

    def noisy(stream):
        for name, tensor in stream:
            yield name, tensor * 2 if name == "model.norm.weight" else tensor

    publish(engine, network, change=noisy)
    assert torch.equal(network.model.norm.weight, before)
    assert torch.equal(engine.network.model.norm.weight, before * 2)


def test_a_sampler_of_its_own_stays_at_its_version():
    network = build_network()
    engine = engine_of(network, share="never")
    before = engine.generate(PROMPTS, 2, seed=0)
    network.model.norm.weight.data *= 2
    assert engine.generate(PROMPTS, 2, seed=0) == before


def test_norms_can_be_replaced_alone():
    network = build_network()
    engine = engine_of(network)
    norm = network.model.norm.weight.detach() * 1.5
    engine.perturb(iter([("model.norm.weight", norm)]), version=4)
    assert torch.equal(engine.network.model.norm.weight, norm)
    with torch.no_grad():
        expected = build_network()
        expected.model.norm.weight.copy_(norm)
    completions = engine.generate(PROMPTS, 2, seed=0)
    assert completions[0].version == 4
    check_log_probs(expected, PROMPTS, completions, 2)
    with pytest.raises(ValueError, match="not a norm"):
        engine.perturb(iter([("model.layers.0.mlp.up_proj.weight", norm)]), version=5)


def dropping(*names):
    return lambda stream: ((name, tensor) for name, tensor in stream if name not in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dropping("model.layers.1.mlp.up_proj.weight_packed"), "up_proj arrived without weight"),
        (dropping("model.norm.weight"), r"model\.norm\.weight"),
        (lambda stream: (pair for item in stream for pair in (item, item)), "twice"),
        (lambda stream: ((name.replace("o_proj", "out_proj"), tensor) for name, tensor in stream), "no tensor named"),
        (lambda stream: ((n, x[:-1] if n == "model.norm.weight" else x) for n, x in stream), "does not fit"),
    ],
)
def test_faulty_streams_are_named_and_leave_the_engine_unusable(network, change, message):
    format = formats.get("int4_group", group_size=16)
    engine = engine_of(network, format)
    with pytest.raises(ValueError, match=message):
        publish(engine, network, format, 1, change)
    with pytest.raises(RuntimeError, match="whole set of weights"):
        engine.generate(PROMPTS, 1, seed=0)
    publish(engine, network, format, 2)
    assert engine.generate(PROMPTS, 1, seed=0)[0].version == 2


def test_prompts_and_settings_that_cannot_be_answered(network):
    engine = engine_of(network)
    with pytest.raises(ValueError, match="empty"):
        engine.generate([[3], []], 1, seed=0)
    with pytest.raises(ValueError, match="64 positions"):
        engine.generate([[3] * 60], 1, seed=0)
    with pytest.raises(ConfigError, match="Prompt 1 holds a token"):
        engine.generate([[3], [network.config.vocab_size]], 1, seed=0)
    assert len(engine.generate([[3]], 1, seed=0)) == 1
    with pytest.raises(ConfigError, match="cache_gigabytes is too small"):
        TransformersEngine(cache_gigabytes=0)
    with pytest.raises(ConfigError, match="top_p"):  # before any weight
        TransformersEngine().validate(SamplerSpec(sampling=SamplingParams(top_p=2.0)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "fp8_tensor", "fp8_row", "int4_group"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu_decode_and_score_agree(name, cuda_graphs):
    network = build_network(
        hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=4096, tie_word_embeddings=False
    )
    network = network.bfloat16().cuda()
    engine = engine_of(network, formats.get(name) if name else None, cuda_graphs=cuda_graphs)
    completions = engine.generate(PROMPTS, 64, seed=0)
    assert not engine.trust.broken
    assert completions == engine.generate(PROMPTS, 64, seed=0)
    # Per-tensor activation scales differ between a decode step and a whole sequence.
    assert scored_apart(engine, completions, 64) < (0.1 if name in (None, "int4_group") else 0.3)


@pytest.mark.gpu
def test_on_a_gpu_batch_invariance_is_refused_with_an_engine_that_has_it():
    network = build_network(hidden_size=512, intermediate_size=1024, head_dim=128, vocab_size=4096)
    with pytest.raises(ConfigError, match=r"depend on the sequences beside it.*or take VLLMEngine"):
        engine_of(network.bfloat16().cuda(), batch_invariant=True)


@pytest.mark.parametrize("max_batch", [None, 3])
def test_every_token_says_which_experts_it_took(max_batch):
    network = build_mixture()
    sampling = SamplingParams(max_tokens=12, stop_token_ids=(EOS, 4, 5, 6))
    engine = engine_of(network, None, sampling, {"routes": True}, max_batch=max_batch)
    completions = engine.generate(PROMPTS, 3, seed=5)
    assert len({len(completion.token_ids) for completion in completions}) > 2  # rows end, and others take their place
    for index, completion in enumerate(completions):
        prompt, routes = PROMPTS[index // 3], completion.routed_experts
        with Routing(network).applied() as routing, torch.no_grad():
            network(torch.tensor([prompt + completion.token_ids]))
        assert routes is not None
        assert routes.dtype == torch.uint8
        assert not differing(routes[:-1], routing.own[:-1]).any()
        assert bool((routes[-1] == 255).all())  # nothing is computed of the last token
    engine.spec = SamplerSpec(sampling=sampling)
    again = engine.generate(PROMPTS, 3, seed=5)
    assert [one.token_ids for one in again] == [one.token_ids for one in completions]
    assert {one.routed_experts for one in again} == {None}


@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 3}, {"top_p": 0.8, "top_k": 4, "temperature": 1.4}])
def test_an_engine_says_among_which_ids_a_token_was_drawn(truncation):
    torch.manual_seed(0)
    network = build_network()
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(EOS, 9, 14), **truncation)
    engine = engine_of(network, None, sampling, {"kept": True})
    for prompt, drawn in zip([one for one in PROMPTS for _ in range(3)], engine.generate(PROMPTS, 3, 0), strict=True):
        tokens = [*prompt, *drawn.token_ids]
        with torch.no_grad():
            logits = engine.network(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].double()
        kept = truncate(logits / sampling.temperature, sampling.top_k, sampling.top_p).isfinite()
        assert [sorted(ids.tolist()) for ids in drawn.kept] == [row.nonzero()[:, 0].tolist() for row in kept]
    plain = engine.generate(PROMPTS, 3, 0, None, sampling)  # an evaluation asks for none
    assert plain[0].kept is None
    assert [one.token_ids for one in plain] == [one.token_ids for one in engine.generate(PROMPTS, 3, 0)]


@pytest.mark.parametrize("in_slots", [False, True])
@pytest.mark.parametrize("max_batch", [64, 4])
def test_rows_that_have_ended_are_handed_out_while_others_go_on(max_batch, in_slots, network):
    tokens, stops = (24, ()) if in_slots else (12, range(3, 60, 5))
    sampling = SamplingParams(max_tokens=tokens, stop_token_ids=(EOS, *stops))
    engine = engine_of(network, sampling=sampling, max_batch=max_batch, cuda_graphs=in_slots)
    assert engine.continuous == in_slots
    done, handed = [0], []

    def progress(ended, tokens):
        done[0] = ended

    def finished(drawn):
        handed.append((done[0], drawn))

    drawn = engine.generate(PROMPTS, 4, 7, progress, finished=finished)
    first = {}
    for _, part in handed:
        first = part | first
    assert [(first[i].token_ids, first[i].logprobs, first[i].finish_reason) for i in range(16)] == [
        (one.token_ids, one.logprobs, one.finish_reason) for one in drawn
    ]
    assert len({one.finish_reason for one in drawn}) == 2
    assert handed[0][0] < 16  # the rest went on
    assert len(handed) > (2 if in_slots else 4)  # slots are looked at every few steps


MIXED = {"compute_dtype": torch.bfloat16}


def off(network, completions, **under):
    """Mean |Δ log p| to one full forward pass of the learner."""
    with torch.autocast("cpu", torch.bfloat16, **under):
        own = [full_forward(network, PROMPTS[i // 6], one) for i, one in enumerate(completions)]
    pairs = zip(own, completions, strict=True)
    got = [(p.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0], torch.tensor(one.logprobs)) for p, one in pairs]
    return float((torch.cat([p for p, _ in got]) - torch.cat([q for _, q in got])).abs().mean())


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_rollouts_are_drawn_in_the_learners_autocast(network, cuda_graphs):
    engine = engine_of(network, spec=MIXED, cuda_graphs=cuda_graphs)
    completions = engine.generate(PROMPTS, 6, seed=0)
    assert off(network, completions) < 0.5 * off(network, completions, enabled=False)
    with torch.autocast("cpu", torch.bfloat16):  # as Lightning has it around an evaluation
        assert engine.generate(PROMPTS, 6, seed=0) == completions
    scores = engine.score([PROMPTS[0]])[0]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ids = torch.tensor([PROMPTS[0]])
        logits = network(ids).logits[0, :-1].float()
        torch.testing.assert_close(scores, logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0], atol=5e-3, rtol=0)


@pytest.mark.parametrize(
    ("format", "options", "changes"),
    [
        (None, {}, {}),
        (None, {"dtype": "fp32"}, {"compute_dtype": torch.bfloat16}),
        (formats.get("bf16"), {}, {"compute_dtype": torch.bfloat16}),
    ],
)
def test_a_chosen_dtype_holds_whatever_the_caller_is_under(network, format, options, changes):
    engine = TransformersEngine(**options)
    engine.setup(SamplerSpec(sampling=SamplingParams(max_tokens=8), **changes), policy_of(network))
    publish(engine, network, format)
    expected = engine.generate(PROMPTS, 2, seed=0)
    with torch.autocast("cpu", torch.bfloat16 if format is None else torch.float16):
        assert engine.generate(PROMPTS, 2, seed=0) == expected


def test_a_head_of_fp32_stays_so_under_autocast(network):
    engine = engine_of(network, spec=MIXED | {"head_dtype": torch.float32})
    plain = engine_of(network, spec=MIXED)
    completions = engine.generate(PROMPTS, 6, seed=0)
    states = []
    hook = engine.network.model.norm.register_forward_hook(lambda module, args, out: states.append(out))
    scores = engine.score([[*PROMPTS[0], *completions[0].token_ids]])[0]
    hook.remove()
    logits = states[0].float() @ network.get_output_embeddings().weight.T
    ids = torch.tensor([*PROMPTS[0], *completions[0].token_ids])
    expected = logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    drawn = torch.tensor(completions[0].logprobs)
    torch.testing.assert_close(drawn, expected[len(PROMPTS[0]) - 1 :], atol=5e-3, rtol=0)
    assert plain.generate(PROMPTS, 6, seed=0) != completions


def test_quantized_layers_take_their_inputs_as_the_learners_do(network):
    engine = engine_of(network, formats.get("fp8_row"), spec=MIXED)
    layer = engine.network.model.layers[0].mlp.down_proj
    given, out = [], []

    def seen(module, args, result):
        given.append(args[0])
        out.append(result)

    layer.register_forward_hook(seen)
    engine.generate(PROMPTS, 1, seed=0)
    assert set(layer._prepared) == {torch.bfloat16}
    assert {one.dtype for one in out} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(layer.format.linear(given[0].bfloat16(), layer.weight), out[0])


def test_the_cache_is_in_the_dtype_that_attention_multiplies_in(network):
    engine = engine_of(network, spec=MIXED, cache_gigabytes=1e-3)
    assert engine._cache_tokens() == 2 * engine_of(network, cache_gigabytes=1e-3)._cache_tokens()
