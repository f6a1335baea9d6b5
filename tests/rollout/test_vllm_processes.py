"""A run of two processes is the run of one, each with a vLLM of its own or both with the halves of one.

An engine of one process that died is built again by that one alone.
"""

from functools import partial

import pytest
import torch

from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.test_processes import PARTS, RUNS, assert_same, learn, made, taken
from tests.tiny_run import model_folder
from tests.two_processes import RANKS, in_two

pytestmark = pytest.mark.vllm
SIZES = {"head_dim": 32}
"""vLLM on CPU has no attention for heads of 16."""
DIFFERENT = ("publish/probe", "publish/bytes")
"""An engine that was built again is probed again; half an engine is sent half of the bytes."""
NAME = "AIS and a rejection, passes and mini-batches"


class Mortal(VLLMEngine):
    """Dies once, on rank 1, in its second iteration."""

    died = False

    def generate(self, *arguments, **options):
        if torch.distributed.get_rank() == 1 and self.version == 2 and not Mortal.died:
            Mortal.died = True
            raise EngineDiedError("as it was told to")
        return super().generate(*arguments, **options)


class Crossed(VLLMEngine):
    """Gets the halves of one layer the wrong way round."""

    def load_weights(self, tensors, format, version):
        swapped = "model.layers.1.self_attn.q_proj.weight"
        crossed = ((name, tensor.roll(len(tensor) // 2, 0) if name == swapped else tensor) for name, tensor in tensors)
        return super().load_weights(crossed, format, version)


def options(engine=VLLMEngine):
    return {**RUNS[NAME](), "engine": engine(max_num_seqs=64, dtype="fp32", kv_cache_gib=1)}


def halves(engine=VLLMEngine):
    return partial(engine, tensor_parallel_size=RANKS)


def crossed(folder):
    with pytest.raises(PublishError) as caught:
        learn(folder, RANKS, 1, options=partial(options, halves(Crossed)))
    return [(fault.kind, fault.name) for fault in caught.value.faults]


def both(rank, ports, folder):
    """What two processes do in one start."""
    steps = {
        "whole": partial(learn, folder / "whole", RANKS, 3, options=partial(options, Mortal)),
        "in parts": partial(learn, folder / "parts", RANKS, 3, strategy=PARTS, options=options),
    }
    return taken(steps, rank, ports)


def together(rank, ports, folder):
    """What two processes do that are one engine."""
    steps = {
        "one engine": partial(learn, folder / "one", RANKS, 2, strategy=PARTS, options=partial(options, halves())),
        "crossed": partial(crossed, folder / "crossed"),
    }
    return taken(steps, rank, ports)


def assert_same_run(ranks, name, alone):
    found = [made(rank, name) for rank in ranks]
    for row in (row for run in (alone, *found) for row in run["rows"]):
        for key in [key for key in row if key.startswith(DIFFERENT)]:
            del row[key]
    assert_same(found, alone)


def test_two_processes_with_two_engines_repeat_the_run_of_one(tmp_path):
    for name in ("alone", "whole", "parts"):
        model_folder(tmp_path / name / "model", **SIZES)
    ranks = in_two(both, tmp_path)
    alone = learn(tmp_path / "alone", 1, 3, options=options)
    for name in ("whole", "in parts"):
        assert_same_run(ranks, name, alone)


@pytest.mark.slow  # the processes of one engine wait for each other by spinning, minutes where other tests run
@pytest.mark.timeout(900)
def test_two_processes_with_the_halves_of_one_engine_repeat_the_run_of_one(tmp_path):
    for name in ("alone", "one", "crossed"):
        model_folder(tmp_path / name / "model", **SIZES)
    ranks = in_two(together, tmp_path)
    alone = learn(tmp_path / "alone", 1, 2, options=options)
    whole = alone["rows"][0]["publish/bytes"]
    halves = [made(rank, "one engine")["rows"][0]["publish/bytes"] for rank in ranks]
    assert all(0.49 * whole < half < 0.55 * whole for half in halves)  # each is sent its half, and the norms
    assert_same_run(ranks, "one engine", alone)
    assert [made(rank, "crossed") for rank in ranks] == [[("different", "model.layers.1.self_attn.q_proj.weight")]] * 2
