from types import SimpleNamespace

import torch

from lit_qrl.loop.hooks import trainer_all_reduce
from lit_qrl.types import no_all_reduce


def test_trainer_all_reduce_asks_the_strategy():
    seen = []
    strategy = SimpleNamespace(
        reduce=lambda value, reduce_op: seen.append(reduce_op) or value * 2, root_device=torch.device("cpu")
    )
    all_reduce = trainer_all_reduce(SimpleNamespace(strategy=strategy, world_size=2))
    assert float(all_reduce(torch.ones(()))) == 2
    all_reduce(torch.ones(()), op="max")
    assert seen == ["sum", "max"]
    assert trainer_all_reduce(SimpleNamespace(strategy=strategy, world_size=1)) is no_all_reduce


def test_what_lies_on_the_host_is_reduced_on_the_device_of_the_rank():
    """NCCL takes nothing else; `meta` stands for the device."""
    on = []

    def reduce(value, reduce_op):
        on.append(value.device.type)
        return torch.full(value.shape, 3.0)

    trainer = SimpleNamespace(strategy=SimpleNamespace(reduce=reduce, root_device=torch.device("meta")), world_size=2)
    own = torch.ones(2)
    assert trainer_all_reduce(trainer)(own).tolist() == [3, 3]
    assert (on, own.tolist()) == (["meta"], [1, 1])
