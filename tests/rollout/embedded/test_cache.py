import pytest
import torch

from lit_qrl.network.structure import cached, cached_numbers
from lit_qrl.rollout.embedded.cache import HeldRow, SlotCache
from tests.networks import build_network


def filled(rows, width, heads=2, dim=3, layers=2, capacity=None):
    """A cache whose entries say where they came from: 100 · row + column."""
    cache = SlotCache(layers, capacity or rows, width + 4)
    cache.rows = rows
    content = (100 * torch.arange(rows)[:, None] + torch.arange(width)).float()[:, None, :, None]
    for layer in range(layers):
        cache.update(content.expand(rows, heads, width, dim) + layer, -content.expand(rows, heads, width, dim), layer)
    cache.filled = width
    return cache


def test_prompts_are_placed_into_their_slots_and_no_others():
    cache = SlotCache(2, 4, 8)
    cache.place(filled(2, 5), owners=torch.tensor([1, 0, 1]), slots=torch.tensor([3, 0, 2]))
    for layer in range(2):
        keys, values = cache.slots[layer].keys, cache.slots[layer].values
        assert keys.shape == (4, 2, 8, 3)
        assert keys[:, 0, 4, 0].tolist() == [4 + layer, 0, 104 + layer, 104 + layer]
        assert values[:, 0, 4, 0].tolist() == [-4, 0, -104, -104]
        assert (keys[:, :, 5:] == 0).all()  # what a mask hides must be finite


def test_a_step_writes_each_row_at_its_own_column_in_the_same_memory():
    cache = SlotCache(2, 4, 8)
    cache.place(filled(1, 5), torch.tensor([0, 0, 0, 0]), torch.arange(4))
    before, after = cache.slots[1].keys.clone(), cache.slots[1].values.clone()
    memory = cache.slots[1].keys.data_ptr()
    cache.at, cache.rows = torch.tensor([5, 2, 7]), 3
    new = torch.arange(3 * 2 * 3).float().view(3, 2, 1, 3) + 1000
    keys, values = cache.update(new, -new, 1)
    for row, column in enumerate(cache.at.tolist()):
        before[row, :, column], after[row, :, column] = new[row, :, 0], -new[row, :, 0]
    assert torch.equal(keys, before[:3])
    assert torch.equal(values, after[:3])
    assert torch.equal(cache.slots[1].keys, before)
    assert keys.data_ptr() == memory
    assert (cache.get_mask_sizes(1, 1), cache.get_seq_length()) == ((8, 0), 0)
    cache.move(torch.tensor([3]), torch.tensor([0]))
    assert torch.equal(cache.slots[1].keys[0], before[3])


def test_update_writes_in_place_and_returns_what_is_filled():
    cache = filled(3, 4)
    storage = cache.slots[0].keys.data_ptr()
    keys, values = cache.update(torch.full((3, 2, 1, 3), 7.0), torch.full((3, 2, 1, 3), 8.0), 0)
    assert keys.shape == values.shape == (3, 2, 5, 3)
    assert (keys[:, :, 4] == 7).all()
    assert (values[:, :, 4] == 8).all()
    assert keys[2, 0, 3, 0] == 203
    assert keys.data_ptr() == storage


def test_moved_rows_keep_their_contents():
    cache = filled(4, 4)
    cache.move(torch.tensor([3]), torch.tensor([1]))
    cache.rows = 3
    keys, _ = cache.update(torch.zeros(3, 2, 1, 3), torch.zeros(3, 2, 1, 3), 0)
    assert keys[:, 0, 0, 0].tolist() == [0, 300, 200]


def test_bytes_per_token_are_those_of_the_cache():
    network = build_network()
    cache = SlotCache(2, 1, 10)
    with torch.no_grad():
        network.base_model(input_ids=torch.tensor([[3, 4, 5]]), **cached(network, cache))
    held = sum(tensor.nbytes for layer in cache.slots for tensor in (layer.keys, layer.values))
    assert held == 10 * cached_numbers(network.config) * torch.float32.itemsize


def test_exchanged_rows_are_both_kept():
    cache = filled(4, 4)
    cache.move(torch.tensor([3, 2]), torch.tensor([1, 0]), swap=True)
    assert cache.slots[1].keys[:, 0, 1, 0].tolist() == [202, 302, 2, 102]
    assert cache.slots[0].values[:, 0, 3, 0].tolist() == [-203, -303, -3, -103]


def test_rows_of_several_caches_are_restored_before_a_column():
    one, other = filled(3, 4), filled(2, 6)
    cache = SlotCache(2, 3, 7)
    rows = {0: HeldRow(one, 2, 1, [7, 7, 7]), 2: HeldRow(other, 1, 0, [7] * 6)}
    cache.restore(rows, [2, 0, 5], 5)
    assert cache.slots[0].keys[:, 1, :5, 2].tolist() == [[0, 0, 0, 201, 202], [0] * 5, [100, 101, 102, 103, 104]]
    assert cache.slots[1].values[0, 0, :5, 0].tolist() == [0, 0, 0, -201, -202]


def test_rows_of_sequences_of_one_length_are_restored_too():
    held = filled(4, 6)
    cache = SlotCache(2, 3, 7)
    rows = {target: HeldRow(held, row, 1, [7] * 5) for target, row in ((0, 3), (1, 1), (2, 2))}
    cache.restore(rows, [4, 4, 4], 4)
    assert cache.slots[0].keys[:, 1, :4, 2].tolist() == [[row * 100 + c for c in range(1, 5)] for row in (3, 1, 2)]
    assert cache.slots[1].values[1, 0, :4, 0].tolist() == [-101, -102, -103, -104]


@pytest.mark.parametrize(
    "sequence, shared", [([7, 8, 9, 4], 3), ([7, 8, 9], 2), ([7, 3, 9, 4], 1), ([1, 2], 0), ([7, 8, 9, 4, 5], 3)]
)
def test_the_last_token_of_a_sequence_is_never_among_the_shared(sequence, shared):
    assert HeldRow(filled(1, 3), 0, 0, [7, 8, 9]).shared(sequence) == shared


def test_under_autocast_keys_and_values_are_in_its_dtype():
    cache = SlotCache(1, 2, 4)
    new = torch.randn(2, 2, 1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        keys, values = cache.update(new, new.bfloat16(), 0)
    assert keys.dtype == values.dtype == cache.slots[0].keys.dtype == torch.bfloat16
    assert torch.equal(keys, values)
