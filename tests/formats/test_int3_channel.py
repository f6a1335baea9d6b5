import pytest
import torch

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats import Int3Channel
from lit_qrl.formats.support import row_of
from lit_qrl.quantize import quantize_checkpoint, writable
from lit_qrl.rollout.vllm.checks import check_format
from tests.formats.oracle import args, compressed, same_bits, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", list(weights(torch.float32)))
def test_codes_and_scales_are_those_of_compressed_tensors(case, dtype):
    weight = weights(dtype)[case]
    codes, scale, _ = compressed(weight, args(3, "int", "channel"), (1,), weight)
    q = Int3Channel().quantize(weight)
    assert same_bits(q.scales, scale)
    assert torch.equal(Int3Channel().dequantize(q), codes.float() * scale.float())


def test_eight_codes_are_three_bytes_the_first_one_lowest():
    weight = torch.tensor([[3.0, -3.5, 0.0, 1.0, -1.0, 2.0, -2.0, 3.5]])
    q = Int3Channel().quantize(weight)
    expected = [3, -4, 0, 1, -1, 2, -2, 3]
    word = sum((code + 4) << (3 * place) for place, code in enumerate(expected))
    assert q.codes.tolist() == [list(word.to_bytes(3, "little"))]
    assert Int3Channel().dequantize(q).tolist() == [[float(code) for code in expected]]


def test_a_width_that_does_not_fit_is_named():
    with pytest.raises(ConfigError, match=r"q_proj does not fit int3_channel.*divisible by 8.*Exclude"):
        Int3Channel().check("q_proj", (8, 12))


def test_what_nobody_computes_or_reads_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no kernel for publisher\.format int3_channel.*TransformersEngine"):
        check_format(Int3Channel())
    with pytest.raises(ConfigError, match=r"No library reads a folder in int3_channel.*nvfp4.*--format bf16"):
        quantize_checkpoint(tmp_path, tmp_path / "out", formats.get("int3_channel"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError) as refused:
        writable("bf16")
    assert "int3_channel" not in refused.value.expected
    assert not row_of(Int3Channel()).audited
