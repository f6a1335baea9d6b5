from types import SimpleNamespace

from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

from lit_qrl.publish.spec import learners
from lit_qrl.rollout.engine import Learners


def trainer(accelerator, **changes):
    given = {"world_size": 4, "num_nodes": 2, "local_rank": 1, "global_rank": 3, "device_ids": [0, 2]}
    return SimpleNamespace(accelerator=accelerator, **{**given, **changes})


def test_the_learners_gpus_are_those_of_its_host():
    found = learners(trainer(CUDAAccelerator()))
    assert found == Learners(devices=(0, 2), local=(1, 2), whole=(3, 4))


def test_a_learner_on_cpus_has_no_gpu():
    found = learners(trainer(CPUAccelerator(), world_size=1, num_nodes=1, local_rank=0, global_rank=0))
    assert found == Learners()
