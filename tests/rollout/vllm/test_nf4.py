"""The operator against NF4's own dequantization; the engine itself runs in test_vllm.py."""

import subprocess
import sys

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.formats import get
from lit_qrl.formats.nf4 import BLOCK, NF4
from lit_qrl.rollout.vllm import nf4 as vllm_nf4
from tests.networks import build_network
from tests.vllm_engines import build_engine, publish, tiny_network


def packed(rows, columns, seed=0):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    q = NF4().quantize(weight)
    return q, q.codes.view(rows, columns // 2), q.scales.view(rows, columns // BLOCK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_multiplies_by_what_the_codes_stand_for(dtype):
    q, codes, amax = packed(24, 128)
    x = torch.randn(2, 5, 128, dtype=dtype)
    got = vllm_nf4.linear(x, codes, amax)
    assert (got.dtype, got.shape) == (dtype, (2, 5, 24))
    torch.testing.assert_close(got, x @ NF4().dequantize(q, dtype).t())


def test_fused_layers_are_their_parts_one_below_the_other():
    parts = [packed(rows, 128, seed) for seed, rows in enumerate((24, 8, 8))]
    codes, amax = torch.cat([part[1] for part in parts]), torch.cat([part[2] for part in parts])
    x = torch.randn(5, 128)
    expected = torch.cat([vllm_nf4.linear(x, *part[1:]) for part in parts], dim=-1)
    torch.testing.assert_close(vllm_nf4.linear(x, codes, amax), expected)


def test_the_operator_is_whole_for_the_compiler():
    _, codes, amax = packed(24, 128)
    torch.library.opcheck(vllm_nf4.linear, (torch.randn(5, 128), codes, amax), test_utils="test_faketensor")


def test_other_formats_keep_their_own_config():
    assert vllm_nf4.quantization_config(get("fp8_row"), ["a"]) == get("fp8_row").quantization_config(["a"])
    assert vllm_nf4.quantization_config(NF4(), ["a"]) == {"quant_method": vllm_nf4.NAME, "ignore": ["a"]}


def test_rows_that_share_a_block_are_refused():
    network = build_network(hidden_size=64, intermediate_size=96, head_dim=16)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj does not fit nf4 in vLLM.*64.*Given: 96"):
        vllm_nf4.check_shapes(network, ())
    vllm_nf4.check_shapes(network, ["*.down_proj"])


@pytest.mark.vllm
def test_layers_that_are_excluded_stay_plain():
    network, format = tiny_network(), NF4()
    engine = build_engine(network, format, spec={"exclude": ("*.down_proj", "model.layers.1.self_attn.[qkv]_proj")})
    plain = lambda name: "down_proj" in name or "layers.1.self_attn.q" in name  # noqa: E731
    try:
        faults, _, report = publish(network, engine, format, 0)
        assert faults == []
        loaded = {key.rpartition(".")[0]: value for key, value in report.layers.items() if "_proj" in key}
        assert {value for name, value in loaded.items() if plain(name)} == {"fp32"}
        assert loaded["model.layers.0.self_attn.q_proj"] == loaded["model.layers.1.self_attn.o_proj"] == "nf4"
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, vllm_nf4.FEW_ROWS, vllm_nf4.FEW_ROWS + 1, 64])
def test_few_rows_and_many_agree_on_a_gpu_and_in_a_graph(rows):
    weight = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    q = NF4().quantize(weight)
    codes, amax = q.codes.view(256, 256), q.scales.view(256, 512 // BLOCK)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    expected = x.double() @ NF4().dequantize(q, torch.bfloat16).double().t()
    with torch.inference_mode():
        got = vllm_nf4.linear(x, codes, amax)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = vllm_nf4.linear(x, codes, amax)
        graph.replay()
    assert (got.double() - expected).abs().max() < 2**-7 * expected.abs().max()
    assert torch.equal(captured, got)


@pytest.mark.vllm
def test_registering_twice_is_registering_once():
    program = (
        "from lit_qrl.rollout.vllm.nf4 import NAME, register; register()\n"
        "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as q, get_quantization_config as g\n"
        "before = g(NAME); register(); print(q.count(NAME), g(NAME) is before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split()[-2:] == ["1", "True"]
