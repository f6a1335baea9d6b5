from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.patches.scores_under_adapters import by_token


@pytest.mark.parametrize("rows", [2, 5])
def test_every_row_has_the_adapter_of_its_batch_and_the_wrapper_is_as_before(rows):
    wrapper = SimpleNamespace(_sampler_indices=torch.tensor([3, 3, 0, 0, 0, 0]), indices_len=[6, 2])
    seen = []

    def original(wrapper, y, x, scale):
        seen.append((wrapper._sampler_indices[:rows].tolist(), wrapper.indices_len[1], scale))

    wrapper.sampler_indices = wrapper._sampler_indices[:2]
    by_token(original)(wrapper, None, torch.zeros(rows, 4), 0.5)
    assert seen == [([3] * rows, rows, 0.5)]
    assert wrapper._sampler_indices[:2].tolist() == [3, 3]
    assert wrapper.indices_len == [6, 2]
