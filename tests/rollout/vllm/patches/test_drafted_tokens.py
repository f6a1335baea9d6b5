import pytest
import torch

from lit_qrl.rollout.vllm.patches.drafted_tokens import PATCH, _of_any_dtype, _of_no_tokens

GIVEN = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)


def test_each_proposed_token_has_the_setting_of_its_request():
    expand = _of_any_dtype(None)
    for dtype in (torch.float32, torch.int32, torch.int64):
        settings, ends = torch.tensor([3, 0, 2]).to(dtype), GIVEN[1]
        out = torch.full((5,), 9, dtype=dtype)
        expand(out, settings, ends, 0, 1, MAX_NUM_TOKENS=32)
        assert out.tolist() == [3, 3, 2, 2, 2]
    out = torch.empty(4)
    expand(out, torch.tensor([0.0, 0.7]), torch.tensor([3, 4]), 0, 1)
    torch.testing.assert_close(out, torch.tensor([1.0, 1.0, 1.0, 0.7]))


def test_a_step_without_proposed_tokens_is_left_as_it_is():
    asked = []
    keep = _of_no_tokens(lambda logits, k: asked.append(k) or logits + 1)
    empty = torch.empty(0, 4)
    assert keep(empty, torch.empty(0)) is empty
    assert torch.equal(keep(torch.zeros(1, 4), torch.tensor([2])), torch.ones(1, 4))
    assert len(asked) == 1


@pytest.mark.vllm
def test_vllm_s_own_writes_nothing():
    import vllm._custom_ops  # noqa: F401  loads its library
    from vllm.utils import cpu_triton_utils

    expand = getattr(cpu_triton_utils._expand_kernel_impl, "lit_qrl_original", cpu_triton_utils._expand_kernel_impl)
    out = torch.full((5,), 9.0)
    expand(out, *GIVEN, 0, 1)
    assert out.tolist() == [9.0] * 5  # it can go when this fails
    assert PATCH.concerns((0, 32, 0), "cpu")
