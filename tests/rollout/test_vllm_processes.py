"""A run of two processes, each with a vLLM of its own, is the run of one; an engine that died is built again alone."""

from functools import partial

import pytest
import torch

from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.test_processes import PARTS, RUNS, assert_same, learn, made, taken
from tests.tiny_run import model_folder
from tests.two_processes import RANKS, in_two

pytestmark = pytest.mark.vllm
SIZES = {"head_dim": 32}
"""vLLM on CPU has no attention for heads of 16."""
NAME = "AIS and a rejection, passes and mini-batches"


class Mortal(VLLMEngine):
    """Dies once, on rank 1, in its second iteration."""

    died = False

    def generate(self, *arguments, **options):
        if torch.distributed.get_rank() == 1 and self.version == 2 and not Mortal.died:
            Mortal.died = True
            raise EngineDiedError("as it was told to")
        return super().generate(*arguments, **options)


def options(engine=VLLMEngine):
    return {**RUNS[NAME](), "engine": engine(max_num_seqs=64, dtype="fp32", kv_cache_gib=1)}


def both(rank, ports, folder):
    """What two processes do in one start."""
    steps = {
        "whole": partial(learn, folder / "whole", RANKS, 3, options=partial(options, Mortal)),
        "in parts": partial(learn, folder / "parts", RANKS, 3, strategy=PARTS, options=options),
    }
    return taken(steps, rank, ports)


def test_two_processes_with_two_engines_repeat_the_run_of_one(tmp_path):
    for name in ("alone", "whole", "parts"):
        model_folder(tmp_path / name / "model", **SIZES)
    ranks = in_two(both, tmp_path)
    alone = learn(tmp_path / "alone", 1, 3, options=options)
    for name in ("whole", "in parts"):
        found = [made(rank, name) for rank in ranks]
        for row in (row for run in (alone, *found) for row in run["rows"]):
            for key in [
                key for key in row if key.startswith("publish/probe")
            ]:  # the engine built again was probed again
                del row[key]
        assert_same(found, alone)
