"""Write the tables of docs/studies/scale.md on the cost beyond two GPUs: bytes moved, and what an iteration waits for.

    python docs/cost.py

Bytes are counted, seconds follow from the rates of `Machine`, of which those between two GPUs of a host, from the host
and of its launches were measured by `benchmarks/parts.py` on two H200s (2026-11-22); the others are on paper.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SCALE = Path(__file__).resolve().parents[1] / "docs" / "studies" / "scale.md"
MOVED, BOUND = (f"<!-- docs/cost.py writes {what} -->\n" for what in ("what moves", "what bounds"))
END = "<!-- end -->\n"


class Machine(NamedTuple):
    """Rates of a GPU and its surroundings, bytes and operations a second: H200, eight of them in a host.

    Args:
        matmul: bf16 operations, dense.
        utilisation: share of it that an update reaches; measured: 0.37 and 0.46 at 4296 and 8592 tokens of 8B.
        memory: of the GPU.
        streaming: share of it that reading weights reaches.
        capacity: bytes of the GPU.
        link: between GPUs of a host, one way, as collectives reach it; measured of a gather, 215 of a sum.
        network: of a host, all its cards together, one way, as collectives reach it.
        host: between a GPU and its host.
        hop: seconds from one GPU of a ring to the next.
        launches: seconds in which the host queues a decoder layer of a micro-batch, forward, again and backward.
    """

    matmul: float = 989e12
    utilisation: float = 0.4
    memory: float = 4.8e12
    streaming: float = 0.7
    capacity: float = 141e9
    link: float = 220e9
    network: float = 340e9  # eight cards of 400 Gbit/s
    host: float = 50e9
    hop: float = 5e-6
    launches: float = 0.018
    gpus_per_host: int = 8


HERE = Machine()


class Model(NamedTuple):
    """A model: parameters, decoder layers, and bytes that a token's keys and values take."""

    parameters: float
    layers: int
    token: int


class Load(NamedTuple):
    """An iteration: sequences over all GPUs, tokens of a prompt and of a completion, rows of a micro-batch of a GPU."""

    sequences: int = 1024
    prompt: int = 512
    completion: int = 4096
    rows: int = 2


MODELS = {
    "8B": Model(8.03e9, 32, 32 * 2 * 8 * 128 * 2),
    "70B": Model(70.6e9, 80, 80 * 2 * 8 * 128 * 2),
}
"""The shapes of Llama 3."""
BITS = {"bf16": 16, "fp8_row": 8, "nvfp4": 4.5}


class Moved(NamedTuple):
    """Bytes that each GPU receives: of an optimizer step's micro-batch, of a scored one, and of a publish."""

    gathered: float
    reduced: float
    scored: float
    published: float


def moved(model: Model, gpus: int) -> Moved:
    """Return what travels to each GPU under `ShardedStrategy(compute_dtype="bf16")`.

    Weights are gathered in bf16 before a layer's forward and again before its backward pass, gradients are summed in
    fp32; a publish gathers fp32 parts.

    >>> moved(Model(8e9, 32, 0), 2).gathered / 1e9
    16.0
    """
    others = (gpus - 1) / gpus * model.parameters
    return Moved(gathered=4 * others, reduced=4 * others, scored=2 * others, published=4 * others)


def rate(gpus: int, machine: Machine) -> float:
    """Return bytes a second that each GPU of a collective receives: hosts pass whole tensors on, card by card."""
    return machine.link if gpus <= machine.gpus_per_host else min(machine.link, machine.network)


def needed(model: Model, gpus: int, bits: float, offload: bool = False) -> float:
    """Return bytes on each GPU: its part of 16 bytes a weight, two gathered layers, the sampler."""
    part = 0.0 if offload else 16 * model.parameters / gpus
    return part + 8 * model.parameters / model.layers + bits / 8 * model.parameters


class Cost(NamedTuple):
    """Seconds of an iteration: of the update what it computes and what goes on beside that, and the other phases."""

    compute: float
    travel: float
    host: float
    launches: float
    rollout: float
    publish: float

    @property
    def bound(self) -> str:
        """What the longest part waits for."""
        names = {
            "matrix units": self.compute,
            "links between GPUs": self.travel,
            "link to the host": self.host,
            "the host's launches": self.launches,
            "the GPU's memory (decoding)": self.rollout,
        }
        return max(names, key=lambda name: names[name])

    @property
    def iteration(self) -> float:
        """Seconds in all; of what goes on at the same time the longest counts."""
        return max(self.compute, self.travel, self.host, self.launches) + self.rollout + self.publish


def cost(model: Model, gpus: int, load: Load, bits: float, machine: Machine = HERE, offload: bool = False) -> Cost:
    """Return what an iteration of one optimizer step takes, with gradient checkpointing, one score of the rollout.

    Args:
        model: the learner and the sampler.
        gpus: processes.
        load: of the iteration.
        bits: of a weight of the sampler.
        machine: the rates.
        offload: parts are on the host.
    """
    own = load.sequences / gpus
    micro_batches = -(-own // load.rows)
    tokens = own * (load.prompt + load.completion)
    # 2 operations a weight and token: forward, forward again, twice backward, and the score's forward
    compute = (2 + 2 + 4 + 2) * model.parameters * tokens / (machine.matmul * machine.utilisation)
    one = moved(model, gpus)
    collectives = (3 + 1) * (model.layers + 1)
    travel = micro_batches * (
        (one.gathered + one.reduced + one.scored) / rate(gpus, machine) + collectives * (gpus - 1) * machine.hop
    )
    # parts go up in fp32 for each gather, gradients come down
    host = micro_batches * (3 + 1) * 4 * model.parameters / gpus / machine.host if offload else 0.0
    # keys and values have the memory that is left; where they have too little, sequences come one wave after another
    longest = own * (load.prompt + load.completion) * model.token
    waves = math.ceil(longest / (0.9 * machine.capacity - needed(model, gpus, bits, offload)))
    read = waves * bits / 8 * model.parameters + own * (load.prompt + load.completion / 2) * model.token
    rollout = load.completion * read / (machine.memory * machine.streaming)
    publish = one.published / rate(gpus, machine) + (4 + bits / 8) * model.parameters / machine.memory
    return Cost(compute, travel, host, micro_batches * model.layers * machine.launches, rollout, publish)


def moved_lines() -> Iterator[str]:
    """Yield the table of bytes."""
    yield "| model | GPUs | gathered a micro-batch | gradients a micro-batch | gathered a score | a publish |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, model in MODELS.items():
        for gpus in (2, 8, 64, 512):
            cells = " | ".join(f"{part / 1e9:.0f}" for part in moved(model, gpus))
            yield f"| {name} | {gpus} | {cells} |"


def bound_lines() -> Iterator[str]:
    """Yield the table of seconds of 70B."""
    names = ("GPUs", "GB on each", "update computes", "travels", "to the host", "is launched", "rollout", "publish")
    yield f"| {' | '.join((*names, 'iteration', 'bound by'))} |"
    yield f"| --- |{' ---: |' * len(names)} --- |"
    model, load, bits = MODELS["70B"], Load(), BITS["fp8_row"]
    for gpus, offload in ((8, False), (8, True), (64, False), (512, False)):
        held = needed(model, gpus, bits, offload)
        what = f"{gpus}, `offload`" if offload else f"{gpus}"
        if held > HERE.capacity:
            yield f"| {what} | {held / 1e9:.0f} | does not fit | | | | | | | |"
            continue
        found = cost(model, gpus, load, bits, offload=offload)
        seconds = (*found, found.iteration)
        cells = " | ".join(f"{one:.1f}" for one in seconds)
        yield f"| {what} | {held / 1e9:.0f} | {cells} | {found.bound} |"


def main() -> None:
    """Put the tables into the page."""
    for begin, made in ((MOVED, moved_lines()), (BOUND, bound_lines())):
        before, _, rest = SCALE.read_text().partition(begin)
        SCALE.write_text(before + begin + "\n" + "\n".join(made) + "\n\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
