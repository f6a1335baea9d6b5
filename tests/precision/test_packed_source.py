"""The streams of a packed base; those that its plugin's tests see whole are in `test_packed_lora.py`."""

from lit_qrl.precision.packed_source import fingerprint_of
from tests.precision.test_packed_lora import configured, source_of
from tests.precision.toy import LINEARS


def test_fingerprints_tell_bases_apart():
    packed = [packer.packed(policy) for policy, packer in (configured() for _ in range(3))]
    packed[2][LINEARS[3]].codes[0, 0] ^= 1
    same, again, other = map(fingerprint_of, packed)
    assert same == again != other


def test_a_perturbed_norm_is_told_from_the_rest():
    _, source = source_of()
    changed = source.changed_norms(lambda name, tensor: 3 * tensor if name == "model.norm.weight" else tensor)
    assert {name: tensor.tolist() for name, tensor in changed.items()} == {"model.norm.weight": [3.0] * 64}


def test_an_8_bit_base_is_scored_as_its_sampler_computes_and_one_of_4_bits_as_it_is():
    for name, kernel in (("fp8_row", "format"), ("nvfp4", "dequantize")):
        policy, source = source_of(name)
        layers = source.plugin.packed(policy).values()
        for layer in layers:
            layer.kernel = "dequantize"
        with source.as_sampled():
            assert {layer.kernel for layer in layers} == {kernel}
        assert {layer.kernel for layer in layers} == {"dequantize"}
