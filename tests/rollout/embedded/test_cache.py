import pytest
import torch

from lit_qrl.network.structure import cached, cached_numbers
from lit_qrl.rollout.embedded.cache import HeldRow, SlotCache
from tests.networks import build_network


def test_new_columns_are_written_into_the_same_memory_each_row_at_its_own_where_it_has_one():
    cache = SlotCache(1, 4, 8)
    cache.update(*torch.randn(2, 4, 2, 5, 3), 0)
    cache.filled, cache.rows, layer = 5, 3, cache.slots[0]
    expected, memory = (layer.keys.clone(), layer.values.clone()), layer.keys.data_ptr()
    for own, columns, width in ((None, [5, 5, 5], 6), (torch.tensor([5, 2, 7]), [5, 2, 7], 8)):
        cache.at, new = own, torch.randn(2, 3, 2, 1, 3)
        for found, wanted, part in zip(cache.update(*new, 0), expected, new, strict=True):
            wanted[torch.arange(3), :, columns] = part[:, :, 0]
            assert torch.equal(found, wanted[:3, :, :width])
        assert cache.slots[0].keys.data_ptr() == memory
        assert torch.equal(cache.slots[0].keys, expected[0])
    assert (cache.get_mask_sizes(1, 0), cache.get_seq_length()) == ((8, 0), 0)


def test_bytes_per_token_are_those_of_the_cache():
    network = build_network()
    cache = SlotCache(2, 1, 10)
    with torch.no_grad():
        network.base_model(input_ids=torch.tensor([[3, 4, 5]]), **cached(network, cache))
    held = sum(tensor.nbytes for layer in cache.slots for tensor in (layer.keys, layer.values))
    assert held == 10 * cached_numbers(network.config) * torch.float32.itemsize


@pytest.mark.parametrize(
    "sequence, shared", [([7, 8, 9, 4], 3), ([7, 8, 9], 2), ([7, 3, 9, 4], 1), ([1, 2], 0), ([7, 8, 9, 4, 5], 3)]
)
def test_the_last_token_of_a_sequence_is_never_among_the_shared(sequence, shared):
    assert HeldRow(SlotCache(1, 1, 4), 0, 0, [7, 8, 9]).shared(sequence) == shared


def test_under_autocast_keys_and_values_are_in_its_dtype():
    cache = SlotCache(1, 2, 4)
    new = torch.randn(2, 2, 1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        keys, values = cache.update(new, new.bfloat16(), 0)
    assert keys.dtype == values.dtype == cache.slots[0].keys.dtype == torch.bfloat16
    assert torch.equal(keys, values)
