"""A callback that writes what torch's allocator and the driver hold at the end of each phase of an iteration."""

import collections
import json
import time
from pathlib import Path

import torch

from lit_qrl.callbacks import RLCallback


class Held(RLCallback):
    """Appends a line to `held.jsonl` in the run's folder: GiB in use of the device, allocated and reserved by torch.

    Each has the most since the line before; `smallest` is the shortest completion, which decides the layouts. Where
    torch reserves a GiB more than in the line before, `grown` has the largest kinds of segments: MiB of each, how many,
    MiB of all that hold something.
    """

    def __init__(self) -> None:
        self.reserved = 0

    def on_rollout_start(self, trainer, module, version):
        """Of the update before, with what Lightning does between two iterations."""
        self._write(trainer, "before publish")

    def on_rollout_end(self, trainer, module, batch):
        """Of publish and rollout."""
        lengths = batch.mask.sum(dim=1)
        self._write(trainer, "rollout", smallest=int(lengths.min()), ended=int((lengths < lengths.max()).sum()))

    def on_train_epoch_end(self, trainer, pl_module):
        """Of the update."""
        self._write(trainer, "update")

    def _write(self, trainer, phase, **more):
        row = {"iteration": trainer.current_epoch, "after": phase, "at": round(time.monotonic(), 2), **more}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            stats = torch.cuda.memory_stats()
            bytes_held = {
                "driver": total - free,
                "allocated": torch.cuda.memory_allocated(),
                "most_allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "most_reserved": torch.cuda.max_memory_reserved(),
                "split_unused": stats["inactive_split_bytes.all.current"],
            }
            row |= {name: round(value / 2**30, 2) for name, value in bytes_held.items()}
            row |= {"segments": stats["segment.all.current"], "retries": stats["num_alloc_retries"]}
            most = torch.cuda.max_memory_reserved()
            if trainer.current_epoch > 1 and most > self.reserved + 2**30:
                row["grown"] = kinds(torch.cuda.memory_snapshot())
            self.reserved = most
            torch.cuda.reset_peak_memory_stats()
        with (Path(trainer.default_root_dir) / "held.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def kinds(segments):
    """Return the twelve sizes of segments that take most: MiB of one, their number, MiB in use in all.

    >>> kinds([{"total_size": 2**21, "allocated_size": 2**20}] * 2)
    [(2, 2, 2)]
    """
    found = collections.defaultdict(list)
    for segment in segments:
        found[segment["total_size"] >> 20].append(segment["allocated_size"])
    largest = sorted(found, key=lambda size: -size * len(found[size]))[:12]
    return [(size, len(found[size]), sum(found[size]) >> 20) for size in largest]
