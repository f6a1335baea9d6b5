from types import SimpleNamespace

import torch

from lit_qrl.loop.hooks import RLCallback, corrected, overrides, rl_callbacks, trainer_all_reduce
from lit_qrl.types import Correction, no_all_reduce
from tests.callbacks.corrections import context


class Half(RLCallback):
    def correct(self, trainer, module, context):
        return Correction(weights=torch.full_like(context.log_ratio, 0.5))


def test_hooks_default_to_nothing():
    callback, tensor = RLCallback(), torch.ones(2)
    assert callback.on_publish(None, None, "x", tensor) is tensor
    assert callback.correct(None, None, context()) is None
    assert not overrides(callback, "correct")
    assert overrides(Half(), "correct")
    assert list(rl_callbacks(SimpleNamespace(callbacks=[object(), callback]))) == [callback]
    assert not corrected(SimpleNamespace(callbacks=[callback]))
    assert corrected(SimpleNamespace(callbacks=[callback, Half()]))


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
