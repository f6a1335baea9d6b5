from types import SimpleNamespace

import pytest
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

from lit_qrl.publish.spec import learners
from lit_qrl.rollout.engine import Learners


def trainer(accelerator, **changes):
    given = {"world_size": 4, "num_nodes": 2, "local_rank": 1, "global_rank": 3, "device_ids": [0, 2]}
    return SimpleNamespace(accelerator=accelerator, **{**given, **changes})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (trainer(CUDAAccelerator()), Learners(devices=(0, 2), local=(1, 2), whole=(3, 4))),
        (trainer(CPUAccelerator(), world_size=1, num_nodes=1, local_rank=0, global_rank=0), Learners()),
    ],
)
def test_the_learners_gpus_are_those_of_its_host_and_none_on_cpus(given, expected):
    assert learners(given) == expected
