import torch

from lit_qrl.rollout.embedded.cache import SlotCache
from lit_qrl.rollout.embedded.step_cache import StepCache

HEADS, DIM, LAYERS = 2, 3, 2


def prefilled(lengths):
    """A cache whose keys say where they came from, 100 · row + column, and whose values are their negatives."""
    width = max(lengths)
    cache = SlotCache(LAYERS, len(lengths), width)
    content = (100 * torch.arange(len(lengths))[:, None] + torch.arange(width)).float()[:, None, :, None]
    content = content.expand(len(lengths), HEADS, width, DIM)
    for layer in range(LAYERS):
        cache.update(content + layer, -content - layer, layer)
    cache.filled = width
    return cache


def test_prompts_are_placed_into_their_slots_and_no_others():
    cache = StepCache(LAYERS, 4, 8)
    cache.place(prefilled([3, 5]), owners=torch.tensor([1, 0, 1]), slots=torch.tensor([3, 0, 2]))
    for layer in range(LAYERS):
        keys, values = cache.slots[layer].keys, cache.slots[layer].values
        assert keys.shape == (4, HEADS, 8, DIM)
        assert keys[:, 0, 4, 0].tolist() == [4 + layer, 0, 104 + layer, 104 + layer]
        assert torch.equal(values, -keys)
        assert (keys[:, :, 5:] == 0).all()  # what a mask hides must be finite


def test_a_step_writes_each_row_at_its_own_column_in_the_same_memory():
    cache = StepCache(LAYERS, 4, 8)
    cache.place(prefilled([5]), torch.tensor([0, 0, 0, 0]), torch.arange(4))
    before = cache.slots[1].keys.clone()
    memory = cache.slots[1].keys.data_ptr()
    cache.at = torch.tensor([5, 2, 7])
    new = torch.arange(3 * HEADS * DIM).float().view(3, HEADS, 1, DIM) + 1000
    keys, values = cache.update(new, -new, 1)
    for row, column in enumerate(cache.at.tolist()):
        before[row, :, column] = new[row, :, 0]
    assert torch.equal(keys, before[:3])
    assert torch.equal(values, -before[:3])
    assert torch.equal(cache.slots[1].keys, before)
    assert keys.data_ptr() == memory
    assert cache.slots[1].get_mask_sizes(1) == (8, 0)


def test_slots_move_whole():
    cache = StepCache(LAYERS, 4, 8)
    cache.place(prefilled([3, 3, 3, 3]), torch.arange(4), torch.arange(4))
    cache.move(torch.tensor([3, 2]), torch.tensor([0, 1]))
    assert cache.slots[0].keys[:, 1, 2, 0].tolist() == [302, 202, 202, 302]
    assert cache.slots[1].values[:, 1, 2, 0].tolist() == [-303, -203, -203, -303]


def test_under_autocast_keys_and_values_are_in_its_dtype():
    cache = StepCache(1, 2, 4)
    prompts = SlotCache(1, 1, 1)
    prompts.update(torch.zeros(1, 2, 1, 3).bfloat16(), torch.zeros(1, 2, 1, 3).bfloat16(), 0)
    prompts.filled = 1
    cache.place(prompts, torch.tensor([0, 0]), torch.tensor([0, 1]))
    cache.at = torch.tensor([2, 0])
    new = torch.randn(2, 2, 1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        keys, values = cache.update(new, new.bfloat16(), 0)
    assert keys.dtype == values.dtype == cache.slots[0].keys.dtype == torch.bfloat16
    assert torch.equal(keys, values)
