"""Processes that are one engine on a CPU meet in shared memory whose name says nothing of the run.

Two runs on one host would meet each other there, and a run that was killed leaves the name taken. So the name gets a
part that the processes draw together, and is given back as soon as all have the memory.
"""

import os
from pathlib import Path
from typing import Any

from torch import distributed

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

FOLDER = Path("/dev/shm")


def _own(original: Any) -> Any:
    def init_cpu_shm(shared: Any) -> int:
        group = shared.communicator.device_group
        drawn = [os.urandom(8).hex()]
        distributed.broadcast_object_list(drawn, group=group, group_src=0)
        shared.group_name = f"{shared.group_name}-{drawn[0]}"
        handle = original(shared)
        (FOLDER / f"{shared.group_name}_{shared.communicator.rank}".lstrip("/")).unlink(missing_ok=True)
        return handle

    return init_cpu_shm


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "the CPU build names the memory of an externally launched engine by more than its group",
    {"vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed._init_cpu_shm": _own},
    device="cpu",
)
