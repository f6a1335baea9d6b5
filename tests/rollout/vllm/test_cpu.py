"""What the CPU build has, and what it is started with."""

import os

import pytest
import torch

from lit_qrl.formats import support
from lit_qrl.rollout.vllm import cpu as vllm_cpu


@pytest.mark.parametrize(("longest", "budget"), [(100, 2048), (4096, 4096)])
def test_prompts_are_prefilled_in_one_piece(longest, budget):
    arguments = {"max_model_len": longest, "seed": 3}
    expected = {**arguments, "enable_chunked_prefill": False, "max_num_batched_tokens": budget}
    assert vllm_cpu.whole_prefills(arguments) == expected
    chosen = {**arguments, "max_num_batched_tokens": 17}
    assert vllm_cpu.whole_prefills(chosen)["max_num_batched_tokens"] == 17


@pytest.mark.vllm
def test_vllm_takes_that_attention_where_the_host_has_amx(monkeypatch):
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if "CPU_MLA" not in AttentionBackendEnum.__members__:
        pytest.skip("before 0.29 vLLM has no latent attention on a CPU")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    asked = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype=None, block_size=16, use_mla=True
    )
    reference = AttentionBackendEnum.CPU_MLA
    assert CpuPlatform.get_attn_backend_cls(reference, asked) == reference.get_path()
    assert CpuPlatform.get_attn_backend_cls(None, asked) == AttentionBackendEnum.AMX_MLA.get_path()


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["fp8_row", "int8_channel", "int4_group"])
def test_operators_are_missing_where_torch_knows_none_of_that_name(name):
    needed = support.TABLE[name].vllm_cpu_operators
    assert bool(needed) == name.startswith("int")
    known = {operator.removeprefix("_C::") for operator in torch._C._dispatch_get_all_op_names()}
    assert vllm_cpu.missing_operators(needed) == [operator for operator in needed if operator not in known]
    assert vllm_cpu.missing_operators([*needed, "no_such_operator"])[-1] == "no_such_operator"


@pytest.mark.vllm
def test_the_product_of_largest_codes_is_exact_where_the_cpu_has_vnni_instructions():
    got, exact = vllm_cpu.int8_product()
    assert exact == 64 * 127 * 127
    flags = torch.cpu.get_capabilities()
    limited = os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"  # which leaves out VNNI, also a CPU's own of 256 bits
    if limited or not (flags.get("avx512_vnni") or flags.get("avx_vnni")):
        assert abs(got - exact) > 0.1 * exact
    else:
        assert got == exact
