import pytest
import torch

from lit_qrl.loop.contracts import Slots, widest
from lit_qrl.types import no_all_reduce
from tests.functional.helpers import Ranks


def passes(mini_batches, rank, ranks, count=3):
    """The slots of every mini-batch of the first passes, as one rank holds them."""
    slots = Slots(groups=24, mini_batches=mini_batches, rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(5)
    return [[[slots.own[i] for i in groups] for groups in slots.mini_batches_of_pass(generator)] for _ in range(count)]


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_a_mini_batch_holds_the_same_groups_for_any_number_of_ranks(mini_batches, ranks):
    whole = passes(mini_batches, 0, 1)
    parts = [passes(mini_batches, rank, ranks) for rank in range(ranks)]
    for p, dealt in enumerate(whole):
        assert sorted(slot for mini_batch in dealt for slot in mini_batch) == list(range(24))
        for m, mini_batch in enumerate(dealt):
            shares = [part[p][m] for part in parts]
            assert {len(share) for share in shares} == {24 // mini_batches // ranks}
            assert sorted(slot for share in shares for slot in share) == sorted(mini_batch)
    if mini_batches > 1:
        assert len({str([sorted(m) for m in dealt]) for dealt in whole}) == 3  # every pass has an order of its own


def test_ranks_own_every_slot_once_and_know_which_are_open():
    def one(rank, all_reduce):
        slots = Slots(groups=12, mini_batches=3, rank=rank, world_size=2)
        filled = [slot for slot in slots.own if slot % 5]
        assert widest(3 + rank, all_reduce, torch.device("cpu")) == 4
        return slots.own, slots.lacking(filled, all_reduce, torch.device("cpu"))

    (first, second) = Ranks(2).run(one)
    assert sorted(first[0] + second[0]) == list(range(12))
    assert first[1] == second[1] == [0, 5, 10]


def test_one_process_owns_all():
    slots = Slots(groups=6, mini_batches=2)
    assert slots.own == list(range(6))
    assert slots.lacking(slots.own, no_all_reduce, torch.device("cpu")) == []
