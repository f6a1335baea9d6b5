"""What makes a decoding step shorter gives what vLLM's own gives."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from lit_qrl_vllm_fast import decoding

from tests.formats.kernels import test_products_triton as products


def layer_of(n, k, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scale = (torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.5).to(dtype)
    return SimpleNamespace(weight=weight.to(device), weight_scale=scale.to(device))


def quantized(x, *_):
    tiles = x.float().unflatten(-1, (-1, 128))
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    return (tiles / scale).flatten(-2).to(torch.float8_e4m3fn), scale.squeeze(-1)


def exact(codes, scales, layer, bias):
    return products.exact(codes, scales, layer.weight, layer.weight_scale, 0.0 if bias is None else bias.double())


def patched(original):
    return decoding.multiplied(original), SimpleNamespace(
        quant_fp8=quantized, config=SimpleNamespace(out_dtype=torch.bfloat16)
    )


def test_what_our_kernel_does_not_multiply_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr(decoding, "_here", lambda: True)
    monkeypatch.setattr(decoding, "_invariant", lambda: False)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    plain = layer_of(256, 384)
    assert decoding.takes(on_gpu, plain.weight, plain.weight_scale)
    refused = [
        (SimpleNamespace(device=torch.device("cpu")), plain.weight, plain.weight_scale),
        (on_gpu, *vars(layer_of(250, 384)).values()),  # a partial block
        (on_gpu, *vars(layer_of(256, 384, dtype=torch.bfloat16)).values()),
        (on_gpu, plain.weight.t(), plain.weight_scale),
    ]
    assert not any(decoding.takes(*one) for one in refused)
    monkeypatch.setattr(decoding, "_invariant", lambda: True)
    assert not decoding.takes(on_gpu, plain.weight, plain.weight_scale)


def test_a_scale_that_is_of_no_whole_blocks_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr(decoding, "takes", lambda *given: True)
    seen = []
    apply, kernel = patched(lambda *given, **named: seen.append((given, named)))
    made, x, bias = layer_of(256, 384), torch.randn(3, 384), torch.randn(256)
    for scale in (made.weight_scale.t().contiguous().t(), made.weight_scale[:, :1], None):
        layer = SimpleNamespace(weight=made.weight, weight_scale=scale)
        apply(kernel, layer, x, bias, other=1)
        given, named = seen.pop()
        assert named == {"other": 1}
        assert [a is b for a, b in zip(given, (kernel, layer, x, bias), strict=True)] == [True] * 4


def test_codes_and_scales_reach_the_product_with_their_layer_s(monkeypatch):
    monkeypatch.setattr(decoding, "takes", lambda *given: True)

    def multiplied(codes, scales, weight, block_scales, bias, dtype):
        given = SimpleNamespace(weight=weight, weight_scale=block_scales)
        return exact(codes, scales, given, bias).to(dtype)

    monkeypatch.setattr(decoding, "by_blocks", multiplied)
    apply, kernel = patched(lambda *given, **named: pytest.fail("vLLM's own"))
    x, bias = torch.randn(2, 3, 384), torch.randn(256)
    for name in ("weight_scale", "weight_scale_inv"):  # compressed-tensors' name, and that of vLLM's own FP8 folders
        made = layer_of(256, 384)
        layer = SimpleNamespace(weight=made.weight, **{name: made.weight_scale})
        out = apply(kernel, layer, x, bias)
        assert out.shape == (2, 3, 256)
        assert out.dtype == torch.bfloat16
        expected = exact(*quantized(x.view(-1, 384)), made, bias).view(2, 3, 256)
        torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-3)


def test_the_compiler_sees_one_operator():
    operator = decoding._operator()
    layer = layer_of(256, 384)
    codes, scales = quantized(torch.randn(5, 384))
    with torch._subclasses.FakeTensorMode() as mode:
        given = [mode.from_tensor(one) for one in (codes, scales, layer.weight, layer.weight_scale)]
        out = operator(*given, None, torch.bfloat16)
    assert (out.shape, out.dtype) == ((5, 256), torch.bfloat16)


def check(out, expected):
    assert (out.double() - expected).abs().max() < 2**-7 * expected.abs().max()
    assert (out.double() - expected).square().mean().sqrt() < 2**-8 * expected.square().mean().sqrt()


SHAPES = ((4608, 3584, True), (3584, 3584, False), (1024, 18944, False), (37888, 512, False), (1536, 8960, True))


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("rows", [1, 7, 16, 64, 128, 130, 300, 512, 2000])
def test_products_by_blocks_are_those_of_fp64_and_of_vllm_s_kernel(rows):
    from vllm import _custom_ops as ops

    apply, kernel = patched(lambda *given, **named: pytest.fail("vLLM's own"))

    def by_columns(x, *_):
        codes, scales = quantized(x)
        return codes, scales.t().contiguous().t()

    kernel.quant_fp8 = by_columns
    for n, k, biased in SHAPES:
        layer = layer_of(n, k, "cuda")
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16) if biased else None
        out = apply(kernel, layer, x, bias)
        codes, scales = by_columns(x)
        check(out, exact(codes, scales, layer, bias))
        across = layer.weight_scale.t()
        theirs = ops.cutlass_scaled_mm(codes, layer.weight.t(), scale_a=scales, scale_b=across, out_dtype=out.dtype)
        check(out, (theirs if bias is None else theirs + bias).double())


@pytest.mark.gpu
@pytest.mark.vllm
def test_a_recorded_product_repeats_itself():
    apply, kernel = patched(lambda *given, **named: pytest.fail("vLLM's own"))
    layer = layer_of(3584, 3584, "cuda")
    x = torch.randn(48, 3584, device="cuda", dtype=torch.bfloat16)
    first = apply(kernel, layer, x).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = apply(kernel, layer, x)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)
    x.mul_(2)  # a power of two changes scales alone
    graph.replay()
    assert torch.equal(out, 2 * first)


def test_other_devices_and_requests_without_seeds_are_left_to_vllm():
    seen = []
    sample = decoding.drawn_at_once(lambda *given, **named: seen.append((given, named)) or torch.zeros(2))
    probs = torch.full((2, 4), 0.25)
    sample(probs, {0: torch.Generator()}, False)
    sample(probs, {}, use_fp64_gumbel=True)
    assert [(len(given), named) for given, named in seen] == [(3, {}), (2, {"use_fp64_gumbel": True})]


def generators(seeds):
    return {row: torch.Generator("cuda").manual_seed(seed) for row, seed in seeds.items()}


@pytest.mark.gpu
def test_what_a_request_draws_follows_from_its_seed_and_what_it_drew_before():
    sample = decoding.drawn_at_once(lambda *given: pytest.fail("vLLM's own loop"))
    probs = torch.rand(6, 5000, device="cuda").softmax(-1)
    row = probs[2:3]
    many = generators(dict.fromkeys(range(6), 0) | {2: 41})
    first = [sample(probs.clone(), many)[2].item() for _ in range(8)]
    alone = generators({0: 41})
    assert [sample(row.clone(), alone)[0].item() for _ in range(8)] == first
    assert len(set(first)) > 4
    assert many[2].get_offset() == alone[0].get_offset() == 8 * decoding.DRAW
    mixed = {1: generators({0: 41})[0]}  # the other row has no seed
    assert sample(torch.cat([row, row]), mixed)[1].item() == first[0]


@pytest.mark.gpu
def test_words_are_as_frequent_as_they_are_likely():
    sample = decoding.drawn_at_once(lambda *given: pytest.fail("vLLM's own loop"))
    likely = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0], device="cuda")
    count = 20_000
    drawn = sample(likely.repeat(count, 1), generators({row: row + 1 for row in range(count)}))
    seen = torch.bincount(drawn, minlength=6).cpu().double()
    expected = count * likely.cpu().double()[:5]
    assert seen[5] == 0
    assert ((seen[:5] - expected).square() / expected).sum() < 18.5  # χ² with four degrees of freedom at 0.001


def originals():
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder

    found = LogprobsLists.slice_request, LogprobsProcessor._update_sample_logprobs, MsgpackDecoder._decode_ndarray
    return tuple(getattr(one, "lit_qrl_original", one) for one in found)


def tensors(rows, columns, starts=None):
    from vllm.v1.outputs import LogprobsTensors

    generator = torch.Generator().manual_seed(rows)
    logprobs = -torch.rand(rows, columns, generator=generator)
    words = torch.randint(50, (rows, columns), generator=generator)
    return LogprobsTensors(words, logprobs, torch.randint(9, (rows,), generator=generator), starts)


def processor(flat=True, tokenizer=None, count=0):
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    return LogprobsProcessor(tokenizer, create_sample_logprobs(flat), None, 0.0, count, None)


def taken(made, steps, cut, update, sent=lambda part: part):
    for step in steps:
        arrays = step.tolists()
        for request, one in enumerate(made):
            update(one, sent(cut(arrays, request, 1)))
    return made


@pytest.mark.vllm
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("columns", [1, 3])
def test_requests_have_what_vllm_gives_them(flat, columns, apart, monkeypatch):
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    cut, update, read = originals()
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    assert decoding.of_one_word(cut) is cut  # another's front knows no `One`
    monkeypatch.setenv(*(("LIT_QRL_SERVES", "1") if apart else ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")))
    monkeypatch.setattr(MsgpackDecoder, "_decode_ndarray", decoding.of_a_number(read))

    def sent(part):
        output = EngineCoreOutput(request_id="r", new_token_ids=[1], new_logprobs=part)
        given = MsgpackDecoder(EngineCoreOutput).decode(MsgpackEncoder().encode(output)).new_logprobs
        assert type(given) is not decoding.One
        return given

    steps = [tensors(4, columns) for _ in range(3)]
    expected = taken([processor(flat, count=columns - 1) for _ in range(4)], steps, cut, update)
    ours = decoding.of_one_word(cut), decoding.appended(update)
    found = taken(
        [processor(flat, count=columns - 1) for _ in range(4)], steps, *ours, sent if apart else lambda part: part
    )
    assert [one.logprobs for one in found] == [one.logprobs for one in expected]
    assert [one.cumulative_logprob for one in found] == [one.cumulative_logprob for one in expected]
    assert all(len(one.logprobs) == 3 for one in found)


@pytest.mark.vllm
def test_the_arrays_are_vllm_s_where_several_tokens_come_at_once(monkeypatch):
    monkeypatch.setenv("LIT_QRL_SERVES", "1")
    cut, _, _ = originals()
    ours = decoding.of_one_word(cut)
    several, arrays = tensors(5, 1, [0, 2, 5]).tolists(), tensors(5, 1).tolists()
    for given, count in ((several, 1), (arrays, 2)):
        found, expected = ours(given, 1, count), cut(given, 1, count)
        assert type(found) is type(expected)
        assert all((a == b).all() for a, b in zip(found[:3], expected[:3], strict=True))
    assert type(copy.copy(ours(arrays, 1, 1))) is decoding.One


def manager(held, kind="FullAttentionManager", size=16, count=1):
    one = type(kind, (), {})()
    one.block_size, one.req_to_blocks = size, {"r": [object()] * held}
    return SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=[one] * count), empty_kv_cache_blocks="nothing new"
    )


def asked(given, computed, *args, tokens=1, **named):
    allocate = decoding.block_there(lambda *given, **named: "vLLM's own")
    return allocate(given, SimpleNamespace(request_id="r", num_computed_tokens=computed), tokens, *args, **named)


def test_only_a_place_in_a_block_that_is_there_and_stays_open_needs_nothing():
    none = {"num_lookahead_tokens": 0}
    for computed in range(33):
        expected = "nothing new" if computed % 16 not in (0, 15) else "vLLM's own"
        assert asked(manager(3), computed, **none) == expected
    assert asked(manager(1), 17, **none) == "vLLM's own"  # its block was taken away
    assert asked(manager(3), 5, tokens=2, **none) == "vLLM's own"
    assert asked(manager(3), 5, num_lookahead_tokens=1) == "vLLM's own"
    assert asked(manager(3), 5, 0, **none) == "vLLM's own"
    assert asked(manager(3), 5, full_sequence_must_fit=True, **none) == "vLLM's own"
    assert asked(manager(3, "SlidingWindowManager"), 5, **none) == "vLLM's own"
    assert asked(manager(3, count=2), 5, **none) == "vLLM's own"


@pytest.mark.vllm
@pytest.mark.parametrize("behind", [0, 1])  # tokens that are computed and not yet known, as vLLM schedules ahead
def test_blocks_and_what_other_prompts_find_of_them_are_vllm_s(behind):
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    theirs = getattr(KVCacheManager.allocate_slots, "lit_qrl_original", KVCacheManager.allocate_slots)
    asked_of_vllm = []

    def counted(*args, **named):
        asked_of_vllm.append(args)
        return theirs(*args, **named)

    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    found = []
    for allocate in (theirs, decoding.block_there(counted)):
        cache, chance, seen = KVCacheManager(config, 512, 16, 16), random.Random(0), []
        requests = [
            Request(
                f"r{i}", [chance.randrange(50) for _ in range(5 + 9 * i)], SamplingParams(max_tokens=90), None,
                block_hasher=get_request_block_hasher(16, sha256),
            )
            for i in range(6)
        ]  # fmt: skip
        for request in requests:
            allocate(cache, request, request.num_tokens, num_lookahead_tokens=0)
            request.num_computed_tokens = request.num_tokens
        for _ in range(80):
            for request in chance.sample(requests, 4):
                while request.num_tokens < request.num_computed_tokens + 1 - behind:
                    request.append_output_token_ids(chance.randrange(50))
                new = allocate(cache, request, 1, num_lookahead_tokens=0)
                seen.append((request.request_id, new.get_block_ids(), cache.get_block_ids(request.request_id)))
                request.num_computed_tokens += 1
        for request in requests:
            request.append_output_token_ids(1)
            again = Request(
                "again", list(request.all_token_ids), SamplingParams(max_tokens=1), None,
                block_hasher=get_request_block_hasher(16, sha256),
            )  # fmt: skip
            seen.append(cache.get_computed_blocks(again)[1])
        found.append(seen)
    assert found[0] == found[1]
    assert sum(found[0][-6:]) > 6 * 32  # prompts like these are found
    assert len(asked_of_vllm) < 6 + 0.2 * 320
