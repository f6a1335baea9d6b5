import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.precision import NVFP4LoRA
from lit_qrl.precision.vllm_kernels.borrowed import MarlinNVFP4, borrow
from tests.precision.toy import LINEARS, Policy

NVFP4 = formats.get("nvfp4")


def marlin(q, factor=1.0):
    """Words and scales as Marlin's kernel reads them, number by number."""
    out, inside = q.shape
    codes = [[(q.codes[n, k // 2].item() >> 4 * (k % 2)) & 0xF for k in range(inside)] for n in range(out)]
    words = torch.zeros(inside // 16, 2 * out, dtype=torch.int64)
    for row in range(inside // 16):
        for column in range(2 * out):
            tile, place = divmod(column, 128)
            thread, sub = divmod(place, 4)
            c, a = divmod(thread, 4)
            n, k = 64 * tile + 16 * sub + c, 16 * row + 2 * a
            order = [(n, k), (n, k + 8), (n + 8, k), (n + 8, k + 8)]
            order += [(n, k + 1), (n, k + 9), (n + 8, k + 1), (n + 8, k + 9)]
            words[row, column] = sum(codes[y][x] << 4 * i for i, (y, x) in enumerate(order))
    stored = torch.zeros(inside // 16, out, dtype=torch.uint8)
    for row in range(inside // 16):
        for column in range(out):
            tile, place = divmod(column, 64)
            i, j = divmod(place, 8)
            j = 4 * (j // 4) + [0, 2, 1, 3][j % 4]
            scale = q.scales[64 * tile + i + 8 * j, row].float() * factor
            half = (scale * 2**7).half()
            stored[row, column] = (half.view(torch.int16).item() >> 7) & 0xFF if half >= 2 else 0
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words, stored


def weight(out, inside, seed=0, amplitude=0.02):
    return torch.randn(out, inside, generator=torch.Generator().manual_seed(seed)) * amplitude


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_of_a_fused_layer_multiply_out_to_the_bits_of_their_own_codes(dtype):
    sizes, whole = (128, 32, 96), weight(256, 64)
    parts = [NVFP4.quantize(part, whole.abs().amax()) for part in whole.split(sizes)]
    fused = QuantizedWeight(
        torch.cat([q.codes for q in parts]),
        torch.cat([q.scales for q in parts]),
        parts[0].global_scale,
        NVFP4,
        (256, 64),
    )
    words, stored = marlin(fused)
    for start, q in zip((0, 128, 160), parts, strict=True):
        found = MarlinNVFP4(words, stored, start, q.shape[0]).matched(q)
        assert found is not None
        assert torch.equal(found.dequantized(NVFP4, q.global_scale, dtype), NVFP4.dequantize(q, dtype))
        again = found.quantized(NVFP4, q.global_scale)
        assert torch.equal(again.codes, q.codes)
        assert torch.equal(again.scales.view(torch.uint8), q.scales.view(torch.uint8))


def test_a_factor_of_the_engine_is_found_and_undone():
    w = weight(64, 64)
    q = NVFP4.quantize(w, w.abs().amax() * 16)  # the largest scale is far below E4M3's largest
    words, stored = marlin(q, factor=8.0)
    found = MarlinNVFP4(words, stored, 0, 64).matched(q)
    assert found is not None
    assert found.factor == 8.0
    assert torch.equal(found.dequantized(NVFP4, q.global_scale, torch.float32), NVFP4.dequantize(q))


def test_blocks_too_small_for_marlin_are_zero_in_both():
    w = weight(64, 64)
    w[3, 16:32] *= 1e-5
    q = NVFP4.quantize(w)
    found = MarlinNVFP4(*marlin(q), 0, 64).matched(q)
    assert found is not None
    got, own = found.dequantized(NVFP4, q.global_scale, torch.float32), NVFP4.dequantize(q)
    assert torch.equal(got[3, 16:32], torch.zeros(16))
    assert own[3, 16:32].abs().max() < 1e-5 * w.abs().max()
    own[3, 16:32] = 0
    assert torch.equal(got, own)


@pytest.mark.parametrize("part", ["code", "scale", "rows"])
def test_a_difference_is_seen(part):
    q = NVFP4.quantize(weight(64, 64))
    words, stored = marlin(q)
    start = 0
    if part == "code":
        words[2, 77] ^= 1 << 13
    elif part == "scale":
        stored[1, 5] ^= 1
    else:
        words, stored = torch.cat([words, words], 1), torch.cat([stored, stored], 1)
        start = 16
    assert MarlinNVFP4(words, stored, start, 64).matched(q) is None


class Engine:
    """Holds a packed policy's layers in Marlin's order and its embeddings as they are."""

    def __init__(self, plugin, policy):
        self.layers, self.plain = {}, {}
        for name, q in ((name, layer.weight) for name, layer in plugin.packed(policy).items()):
            rows = -(-q.shape[0] // 64) * 64 - q.shape[0]  # the layers of the toy are smaller than a tile
            padded = QuantizedWeight(
                torch.nn.functional.pad(q.codes, (0, 0, 0, rows)),
                torch.nn.functional.pad(q.scales.float(), (0, 0, 0, rows)).to(q.scales.dtype),
                q.global_scale,
                q.format,
                (q.shape[0] + rows, q.shape[1]),
            )
            words, stored = marlin(padded)
            self.layers[name] = MarlinNVFP4(words, stored, 0, q.shape[0])
        for name, parameter in policy.network.named_parameters():
            if "embed" in name or "lm_head" in name:
                self.plain[name] = parameter.detach().clone()

    def stored_weight(self, layer):
        return self.layers.get(layer)

    def read_back(self, name):
        return self.plain.get(name)


@pytest.fixture(scope="module")
def packed():
    def configured(share):
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        policy, plugin = Policy(lora=lora), NVFP4LoRA(share_weights=share)
        policy.configure()
        plugin.configure_policy(policy)
        plugin.convert_module(policy)
        return policy, plugin

    own = configured(False)
    return configured, own, Engine(own[1], own[0])


def settle(plugin, policy, engine):
    plugin.source(policy, plugin.format).settle(engine)


def gradients(policy):
    policy.zero_grad()
    tokens = torch.arange(12).view(2, 6)
    logits = policy(tokens)
    logits.float().square().mean().backward()
    return logits.detach(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]


def test_a_learner_that_borrows_computes_the_same_bits_and_holds_nothing(packed):
    configured, (reference, _), engine = packed
    policy, plugin = configured(True)
    assert all(layer.waits_on_host for layer in plugin.packed(policy).values())
    expected, before = gradients(reference), gradients(policy)  # until then the codes wait on the host, and serve
    settle(plugin, policy, engine)
    after = gradients(policy)
    for logits, grads in (before, after):
        assert torch.equal(logits, expected[0])
        assert all(torch.equal(a, b) for a, b in zip(grads, expected[1], strict=True))
    layers = plugin.packed(policy)
    assert sorted(layers) == sorted(LINEARS)
    assert all(layer.codes is None and layer.scales is None for layer in layers.values())
    embedding = policy.network.model.embed_tokens.weight
    assert embedding.data_ptr() == engine.plain["model.embed_tokens.weight"].data_ptr()


def test_a_shared_base_is_published_as_it_was(packed):
    configured, (reference, plain_plugin), engine = packed
    policy, plugin = configured(True)
    settle(plugin, policy, engine)
    expected = dict(plain_plugin.source(reference, plain_plugin.format).base(None))
    sent = dict(plugin.source(policy, plugin.format).base(None))
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert sent[name].dtype == tensor.dtype
        assert torch.equal(sent[name].view(torch.uint8), tensor.view(torch.uint8))
    assert plugin.state_dict() == plain_plugin.state_dict()


def test_settling_again_goes_over_to_a_new_engine_whose_damage_is_not_published(packed):
    configured, _, engine = packed
    policy, plugin = configured(True)
    settle(plugin, policy, engine)
    other = copy.deepcopy(engine)
    settle(plugin, policy, other)
    for name, layer in plugin.packed(policy).items():
        assert layer.stored.words.data_ptr() == other.layers[name].words.data_ptr()
    other.layers["model.layers.1.mlp.down_proj"].words.zero_()
    with pytest.raises(ConfigError, match="damaged"):
        dict(plugin.source(policy, plugin.format).base(None))


def test_an_engine_with_other_weights_is_refused_by_name(packed):
    configured, _, engine = packed
    policy, plugin = configured(True)
    other = copy.deepcopy(engine)
    other.layers["model.layers.0.mlp.up_proj"].words[0, 0] ^= 1
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj with other codes"):
        settle(plugin, policy, other)
    del other.layers["model.layers.0.self_attn.q_proj"]
    with pytest.raises(ConfigError, match=r"q_proj in a layout that is not known"):
        settle(plugin, policy, other)


def test_plain_weights_in_another_dtype_or_layout_stay_the_learners():
    own = torch.nn.Parameter(torch.randn(4, 3), requires_grad=False)
    for live in (None, own.detach().to(torch.bfloat16), own.detach().T.clone(), own.detach() + 1):
        engine = SimpleNamespace(read_back=lambda name, live=live: live)
        before = own.data_ptr()
        assert borrow({}, {"embed.weight": own}, engine) == []
        assert own.data_ptr() == before


@pytest.mark.gpu
@pytest.mark.parametrize(("out", "inside"), [(512, 1024), (5120, 27648), (1024, 5120)])
def test_the_kernel_multiplies_out_as_the_format_does(out, inside):
    q = NVFP4.quantize(torch.randn(out, inside, device="cuda").bfloat16() * 0.02)
    tile = marlin(NVFP4.quantize(weight(64, 16)))
    assert tile[0].shape == (1, 128)  # the order of a tile is tested above; here tiles are made on the device
    words, stored = made_on_device(q)
    found = MarlinNVFP4(words, stored, 0, out).matched(q)
    assert found is not None
    got = found.dequantized(NVFP4, q.global_scale, torch.bfloat16)
    expected = NVFP4.dequantize(q, torch.bfloat16)
    ulp = (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert ulp.max() <= 1


def made_on_device(q):
    """`marlin` in tensor operations."""
    out, inside = q.shape
    pairs = q.codes.view(out // 64, 4, 2, 8, inside // 16, 2, 4)  # tile, sub, +8, c, row, +8 inputs, a
    pairs = pairs.permute(4, 0, 3, 6, 1, 2, 5).reshape(inside // 16, 2 * out, 4).long()
    shift = torch.tensor([0, 4, 8, 12], device=q.codes.device)
    words = (((pairs & 0xF) << shift) | ((pairs >> 4) << (shift + 16))).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    halves = (q.scales.float() * 2**7).half().view(torch.int16)
    stored = ((halves >> 7) & 0xFF).to(torch.uint8).view(out // 64, 2, 2, 2, 8, inside // 16)
    return words, stored.permute(5, 0, 4, 1, 3, 2).reshape(inside // 16, out).contiguous()


def test_the_device_makes_the_same_tiles():
    q = NVFP4.quantize(weight(128, 64))
    for got, expected in zip(made_on_device(q), marlin(q), strict=True):
        assert torch.equal(got, expected)
