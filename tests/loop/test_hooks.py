from types import SimpleNamespace

import torch

from lit_qrl.loop.hooks import trainer_all_reduce
from lit_qrl.types import no_all_reduce


def test_what_lies_on_the_host_is_reduced_by_the_strategy_on_the_device_of_the_rank():
    """NCCL takes nothing else; `meta` stands for the device."""
    seen = []

    def reduce(value, reduce_op):
        seen.append((value.device.type, reduce_op))
        return torch.full(value.shape, 3.0)

    strategy = SimpleNamespace(reduce=reduce, root_device=torch.device("meta"))
    all_reduce, own = trainer_all_reduce(SimpleNamespace(strategy=strategy, world_size=2)), torch.ones(2)
    assert all_reduce(own).tolist() == all_reduce(own, op="max").tolist() == [3, 3]
    assert (seen, own.tolist()) == ([("meta", "sum"), ("meta", "max")], [1, 1])
    assert trainer_all_reduce(SimpleNamespace(strategy=strategy, world_size=1)) is no_all_reduce
