"""What Hugging Face models ask of a layer of fixed columns, of both caches that have such."""

import pytest
import torch

from lit_qrl.rollout.diffusion.cache import CanvasCache
from lit_qrl.rollout.embedded.step_cache import StepCache


@pytest.mark.parametrize("made", [lambda: CanvasCache(2, 5), lambda: StepCache(2, 3, 5)])
def test_a_forward_sees_all_columns_whatever_it_writes(made):
    cache = made()
    assert cache.get_mask_sizes(1, 1) == cache.get_mask_sizes(4, 0) == (5, 0)
    assert cache.get_seq_length() == 0
    assert [layer.get_max_length() for layer in cache.layers] == [5, 5]
    one = torch.ones(3, 2, 5 if isinstance(cache, CanvasCache) else 1, 4)
    cache.at = None if isinstance(cache, CanvasCache) else torch.tensor([0, 4, 2])
    if not isinstance(cache, CanvasCache):
        cache.layers[1].lazy_initialization(one, one)
    assert cache.layers[1].update(one, one)[0].shape == (3, 2, 5, 4)
    assert cache.get_seq_length() == 0
