"""Two processes with a GPU each, joined by NCCL, repeat the run of one; low-bit learners in parts with their kernels.

Three new processes do a check: two, and the one alone.
`pytest -m gpu -v tests/test_processes_gpu.py` prints a line for each as it ends, and the figures at the end.
"""

import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from lit_qrl.formats import FP8Row
from lit_qrl.precision import NVFP4LoRA, QATAligned, UnifiedFP8
from lit_qrl.strategies import ShardedStrategy
from tests.test_processes import ADAPTED, FIRST, PARTS, RUNS, SHARDED, WRITTEN_IN_PARTS, drawn_alike, learn, low_bit
from tests.tiny_run import model_folder
from tests.two_processes import RANKS, free_ports, join

pytestmark = pytest.mark.gpu
ACCELERATOR = "gpu"
LIMIT = 150
"""Seconds of a check, its processes' imports counted in."""
AT_ONCE = 3
RANKED = (*range(RANKS), None)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Of which every matrix is whole blocks of 128."""
CLOSE = 1e-4
"""What fp32 sums in another order may differ by, as a share of the largest of a tensor's numbers."""
ROUNDED = 0.01
"""The same where norms and activations are in bf16."""
REPEATED = {
    FIRST: (lambda: "ddp", RUNS[FIRST]),
    "full weights in parts": (PARTS, RUNS[FIRST]),
    "offloaded weights in parts": (partial(ShardedStrategy, "fp32", offload=True), RUNS[FIRST]),
    "Muon in parts": (PARTS, SHARDED["Muon in parts"]),
    "aligned in parts": (PARTS, lambda: {**SHARDED["aligned in parts"](), "data": {}}),
    "adapter in parts": (PARTS, SHARDED["adapter in parts"]),
    "replicated base under parts": (PARTS, SHARDED["replicated base under parts"]),
    "packed base in parts": (partial(ShardedStrategy, "fp32", packed_base="sharded"), SHARDED["packed base in parts"]),
}
"""A strategy of two processes, and the run that one repeats without it, in fp32."""
BESIDE = {
    "unified in parts": lambda: low_bit(UnifiedFP8(autocast="bf16"), data={}),
    "aligned FP8 in parts": lambda: low_bit(QATAligned(FP8Row(), autocast="bf16"), data={}),
    "replicated NVFP4 in bf16": lambda: low_bit(NVFP4LoRA(autocast="bf16"), data={}, policy=ADAPTED),
    "packed NVFP4 in bf16": lambda: low_bit(NVFP4LoRA(autocast="bf16"), data={}, policy=ADAPTED),
}
"""The GPU's low-bit products: rows that are batched otherwise are rounded otherwise, so beside whole learners."""


def steps():
    """Return what each process of each check does: `run(rank, ports, folder)`, rank None for the one alone."""
    found = {}
    for name, options in BESIDE.items():
        parts = partial(ShardedStrategy, "fp32", packed_base="sharded" if name.startswith("packed") else "replicated")
        found[name] = partial(beside_whole_ones, parts, options)
    for name, (strategy, options) in REPEATED.items():
        found[name] = partial(both, strategy, options, 1 if name.startswith("aligned") else 2)
    found["resumed from parts"] = went_on
    return found


def beside_whole_ones(strategy, options, rank, ports, folder):
    """Learn as one of two, in parts and then with all weights."""
    if rank is None:
        return {}
    found = {}
    for name, chosen in (("parts", strategy), ("whole", lambda: "ddp")):
        join(rank, ports)
        found[name] = learn(folder, RANKS, 2, strategy=chosen, options=options, accelerator=ACCELERATOR)
        torch.distributed.destroy_process_group()
    return found


def both(strategy, options, epochs, rank, ports, folder):
    """Learn as one of two, or alone."""
    place = {"accelerator": ACCELERATOR}
    if rank is not None:
        join(rank, ports)
        return learn(folder, RANKS, epochs, strategy=strategy, options=options, **place)
    return learn(folder, 1, epochs, options=options, **place)


def went_on(rank, ports, folder):
    """Two processes that write parts, one, two again; or one without a break."""
    options = {"options": RUNS[FIRST], "accelerator": ACCELERATOR}
    if rank is None:
        return learn(folder, 1, 6, **options)
    first = torch.multiprocessing.get_context("spawn").Process(target=_first_two, args=(rank, next(ports), folder))
    first.start()
    first.join()
    last = folder / "run" / "checkpoints" / "last.ckpt"
    if rank == 0:
        learn(folder, 1, 4, ckpt_path=last, **options)
    join(rank, ports)
    return learn(folder, RANKS, 6, ckpt_path=last, strategy=WRITTEN_IN_PARTS, **options)


def _first_two(rank, port, folder):
    if ACCELERATOR == "gpu":
        torch.cuda.set_device(rank)
    join(rank, iter([port]))
    learn(folder, RANKS, 2, strategy=WRITTEN_IN_PARTS, options=RUNS[FIRST], accelerator=ACCELERATOR)
    torch.distributed.destroy_process_group()


def _process(rank, name, ports, folder):
    """Do one check. A process joins its peers once: torch 2.11's NCCL groups of parts do not survive a second time."""
    torch.set_num_threads(1)
    own, began = place_of(folder, name), time.monotonic()
    try:
        if rank is not None and ACCELERATOR == "gpu":
            torch.cuda.set_device(rank)
        found = steps()[name](rank, iter(ports), own / ("alone" if rank is None else "two"))
        found["seconds"] = time.monotonic() - began
        if torch.distributed.is_initialized():  # before the answer: what fails here is this check's
            torch.distributed.destroy_process_group()
    except Exception:
        found = traceback.format_exc()
    torch.save(found, own / f"{rank}.part")
    (own / f"{rank}.part").rename(own / f"{rank}.pt")


def place_of(folder, name):
    """Return where a check's files are."""
    return folder / name.split(",")[0].replace(" ", "_")


def checked(folder, name, ports):
    """Do one check in its three processes; return what each found, or why it found nothing."""
    context = torch.multiprocessing.get_context("spawn")  # libraries ask CUDA for something when they are imported
    begun = time.monotonic()
    processes = [context.Process(target=_process, args=(rank, name, ports, folder)) for rank in RANKED]
    for process in processes:
        process.start()
    while any(one is None for one in results(folder, name)) and time.monotonic() - begun < LIMIT:
        if any(type(one) is str for one in results(folder, name)) or any(one.exitcode for one in processes):
            time.sleep(1.0)  # the others may have an answer, too
            break
        time.sleep(0.2)
    found = results(folder, name)
    for number, process in enumerate(processes):
        if found[number] is None:
            ended = "it still ran" if process.exitcode is None else f"exit code {process.exitcode}"
            found[number] = f"No answer after {time.monotonic() - begun:.0f} s: {ended}."
        process.kill()
        process.join()
    return found


def results(folder, name):
    """Return what a check's processes have returned, None of those that have not."""
    files = [place_of(folder, name) / f"{rank}.pt" for rank in RANKED]
    return [torch.load(file, map_location="cpu", weights_only=False) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Return what both processes of a check and the one alone found; some checks are done at once."""
    if ACCELERATOR == "gpu" and (present := torch.cuda.device_count()) < RANKS:
        pytest.skip(f"needs two GPUs: {present} found")
    folder, names = tmp_path_factory.mktemp("ranks"), list(steps())
    for name in names:  # before there are threads, which would share the generator of their weights
        for place in ("alone", "two"):
            model_folder(place_of(folder, name) / place / "model", **SIZES)
    pool, ports = ThreadPoolExecutor(AT_ONCE), iter(free_ports(2 * len(names)))
    done = {name: pool.submit(checked, folder, name, [next(ports), next(ports)]) for name in names}

    def check(name):
        found = done[name].result()
        wrong = [f"{rank}: {one}" for rank, one in zip(RANKED, found, strict=True) if type(one) is not dict]
        if wrong:
            pytest.fail("\n".join(wrong))
        return found

    yield check
    pool.shutdown(cancel_futures=True)


def furthest(found, wanted):
    """Return the largest difference of any tensor as a share of its largest number, and of which."""
    assert found.keys() == wanted.keys()
    far = {
        name: float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
        for name, value in wanted.items()
    }
    name = max(far, key=far.__getitem__)
    return far[name], name


@pytest.mark.parametrize("name", BESIDE)
def test_a_low_bit_learner_in_parts_computes_as_whole_ones_do(name, check, margin):
    *two, _ = check(name)
    far = 0.0
    for found in two:
        parts, whole_ones = found["parts"], found["whole"]
        assert parts["tokens"][0] == whole_ones["tokens"][0]
        far = max(far, furthest(parts["gradients"][0], whole_ones["gradients"][0])[0])
    margin("two GPUs", f"{name} {far:.1e} ({max(one['seconds'] for one in two):.0f} s)")
    assert far <= ROUNDED


@pytest.mark.parametrize("name", REPEATED)
def test_two_gpus_repeat_the_run_of_one(name, check, margin):
    *two, alone = check(name)
    drawn_alike(two, alone, 1)
    far = max(furthest(part["gradients"][0], alone["gradients"][0]) for part in two)
    margin("two GPUs", f"{name} {far[0]:.1e} ({max(one['seconds'] for one in two):.0f} s)")
    assert far[0] <= CLOSE, far
    drawn_alike(two, alone)
    moved = max(furthest(part["weights"], alone["weights"]) for part in two)
    assert moved[0] <= CLOSE, moved


def test_a_run_that_writes_parts_goes_on_with_one_process_and_with_two_again(check, margin):
    *two, alone = check("resumed from parts")
    far = max(furthest(part["weights"], alone["weights"]) for part in two)
    margin("two GPUs", f"resumed from parts, weights {far[0]:.1e} ({max(one['seconds'] for one in two):.0f} s)")
    assert far[0] <= CLOSE, far
    for part in two:
        assert part["tokens"] == [
            [alone["tokens"][i][row] for slot in part["own"] for row in range(slot * 4, slot * 4 + 4)] for i in (4, 5)
        ]
