import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.wiring import norms_before_projections
from tests.examples.scripts import ROOT, importing
from tests.families.configs import BY_TYPE, random_network

POLICY = ROOT / "models" / "tiny-prefix-sum"
TOKENS = torch.arange(24)[None]


@pytest.fixture(scope="module")
def script():
    with importing("mismatch_dial") as module:
        yield module("dial")


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def logits(network):
    return network(input_ids=TOKENS).logits


@torch.no_grad()
def error(network, format):
    """Mean |log-ratio| over the whole vocabulary of a sampler in that format."""
    before = logits(network).log_softmax(-1)
    for layer in quantizable_linears(network).values():
        layer.weight.copy_(format.dequantize(format.quantize(layer.weight)))
    after = logits(network).log_softmax(-1)
    return (before.exp() * (before - after).abs()).sum(-1).mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_two_leaves_every_bit_of_the_logits(script, tmp_path, dtype):
    assert script.main(["--model", str(POLICY), "--output", str(tmp_path / "out"), "--scale", "16"]) == 0
    assert torch.equal(logits(load(tmp_path / "out", dtype)), logits(load(POLICY, dtype)))


def test_another_scale_leaves_the_logits_to_rounding_and_saves_fp32(script, tmp_path):
    assert script.main(["--model", str(POLICY), "--output", str(tmp_path / "out"), "--scale", "11"]) == 0
    assert load(tmp_path / "out", "auto").dtype == torch.float32
    assert (logits(load(tmp_path / "out")) - logits(load(POLICY))).abs().max() < 1e-4


def test_the_dial_turns_int4_and_not_fp8(script):
    distances = {}
    for scale in (1.0, 8.0, 64.0):
        for name, options in (("int4_group", {"group_size": 64}), ("fp8_row", {})):
            network = load(POLICY)
            assert script.dial(network, scale) == 4  # two norms of two layers
            distances[name, scale] = error(network, formats.get(name, **options))
    assert 2 * distances["int4_group", 1.0] < distances["int4_group", 8.0] < distances["int4_group", 64.0]
    assert distances["int4_group", 64.0] > 0.1
    assert distances["fp8_row", 64.0] < 1.5 * distances["fp8_row", 1.0] + 1e-3


def test_as_many_channels_as_asked_and_the_same_ones_again(script):
    networks = [load(POLICY) for _ in range(3)]
    for network, seed in zip(networks, (0, 0, 1), strict=True):
        script.dial(network, 4.0, channels=3, seed=seed)
    plain = load(POLICY)
    for name in norms_before_projections(plain):
        turned = [
            (network.get_parameter(name) != plain.get_parameter(name)).nonzero().flatten() for network in networks
        ]
        assert len(turned[0]) == 3
        assert torch.equal(turned[0], turned[1])
    assert any((a != b).any() for a, b in zip(networks[0].parameters(), networks[2].parameters(), strict=True))


def test_a_model_whose_norms_multiply_by_one_plus_their_weight_is_refused(script):
    with pytest.raises(ConfigError, match="function would not stay"):
        script.dial(random_network(BY_TYPE["gemma2"]), 8.0)


def test_a_scale_that_is_none(script, tmp_path, capsys):
    assert script.main(["--model", str(POLICY), "--output", str(tmp_path / "out"), "--scale", "0"]) == 2
    assert "--scale is out of range" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
