"""What the CPU build has, and what it is started with."""

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
@pytest.mark.parametrize("name", ["fp8_row", "nf4", "int8_channel", "int4_group"])
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
    limited = torch.backends.cpu.get_cpu_capability() == "AVX2" and not flags.get("avx_vnni")
    if limited or not (flags.get("avx512_vnni") or flags.get("avx_vnni")):
        assert abs(got - exact) > 0.1 * exact
    else:
        assert got == exact
