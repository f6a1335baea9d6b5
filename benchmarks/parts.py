"""What one or several GPUs of a host give a learner in parts, piece by piece and without an engine, each in seconds.

    python benchmarks/parts.py --gpus 2 --shape 8b --sequences 4 8 16 --profile --out out.json
    python benchmarks/parts.py --gpus 1 --shape 3b --sequences 16 --out one.json

links     GB/s that each GPU receives of an all-gather and a reduce-scatter of the size of a decoder layer, microseconds
          of a small one, GB/s from pinned memory of the host; the rates of `docs/cost.py`
pass      a forward and backward pass of `ShardedStrategy` over so many completions of 512 tokens, eight to a prompt of
          200: milliseconds, and `host` until all of it is queued
step      of AdamW on this process's parts
publish   the learner's weights gathered, quantized to `fp8_row` and summed, as a publish sends them, without an engine

Weights are random. `--profile` prints the kernels and host operators of a pass and of a publish. `--tiny` tries every
line on CPUs.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from iteration import SHAPES  # noqa: E402


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", default="8b", choices=sorted(SHAPES))
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 16], help="of a micro-batch, multiples of 8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compute-again", choices=("on", "off"), default="on", help="gradient checkpointing")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, on CPUs")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


def start(gpus: int) -> int:
    """Start a process for each GPU, of which the first prints and writes; return the worst of their statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(gpus)}
    environments = [{**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(gpus)]
    processes = [subprocess.Popen([sys.executable, *sys.argv], env=one) for one in environments]
    try:
        return max(process.wait() for process in processes)
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    args = parse()
    if "RANK" not in os.environ:  # before the imports, which each process makes for itself
        sys.exit(start(args.gpus))

import torch  # noqa: E402
from passes import DEVICE, micro_batch  # noqa: E402
from qerl import write_model  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from lit_qrl import formats  # noqa: E402
from lit_qrl.network.shards import own  # noqa: E402
from lit_qrl.policy import CausalPolicy  # noqa: E402
from lit_qrl.precision.source import WeightSource, unchanged  # noqa: E402
from lit_qrl.receipts.ledger import SentLedger  # noqa: E402
from lit_qrl.strategies.sharded import ShardedStrategy  # noqa: E402


def main(args: argparse.Namespace) -> None:
    """Measure, as one of the processes."""
    rank = int(os.environ["RANK"])
    device = torch.device(DEVICE.type, rank) if DEVICE.type == "cuda" else DEVICE
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    begun, found = time.perf_counter(), {"gpus": args.gpus, "shape": "tiny" if args.tiny else args.shape}

    def tell(name: str, figures: Any) -> None:
        found[name] = figures
        if rank == 0:
            print(f"{time.perf_counter() - begun:6.1f} {name}: {figures}", flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(found, indent=1))

    if device.type == "cuda" and rank == 0:
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
        tell("topology", topology.stdout[:1500])
    tell("links", links(args, device))
    policy = divided(args, device)
    tell("start", round(time.perf_counter() - begun, 1))
    for sequences in args.sequences:
        tell(f"pass of {sequences}", passes(policy, sequences, args, device))
    one = passed(policy, args.sequences[0], args, device)
    profile(one, "pass", args, rank)
    tell("step", step(policy, args, device))
    stream = published(policy)
    tell("publish", timed(stream, args.repeats, device))
    profile(stream, "publish", args, rank)
    distributed.destroy_process_group()


def wait(device: torch.device) -> None:
    """Wait for the device and for all processes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], repeats: int, device: torch.device) -> dict[str, float]:
    """Return milliseconds of some work, and of them those until all of it is queued."""
    work()
    whole, host = [], []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        work()
        host.append(time.perf_counter() - start)
        wait(device)
        whole.append(time.perf_counter() - start)
    return {"ms": round(1e3 * statistics.median(whole), 2), "host": round(1e3 * statistics.median(host), 2)}


def links(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return the rates of collectives, and of copies from the host."""
    count = 2**20 if args.tiny else 2**28
    whole = torch.empty(count, dtype=torch.bfloat16, device=device)
    part = torch.empty(count // args.gpus, dtype=torch.bfloat16, device=device)
    others = (args.gpus - 1) / args.gpus * whole.nbytes

    def rate(work: Callable[[], Any], size: float) -> float:
        return round(size / 1e6 / timed(work, 5, device)["ms"], 1)

    found = {}
    if args.gpus > 1:
        found["gathered"] = rate(lambda: distributed.all_gather_into_tensor(whole, part), others)
        found["reduced"] = rate(lambda: distributed.reduce_scatter_tensor(part, whole), others)
        small, parts = torch.empty(64 * args.gpus, device=device), torch.empty(64, device=device)
        many = timed(lambda: [distributed.all_gather_into_tensor(small, parts) for _ in range(100)], 3, device)
        found["small_us"] = round(10 * many["ms"], 1)
    if device.type == "cuda":
        pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(2**28, dtype=torch.uint8, device=device)
        found["from_host"] = rate(lambda: there.copy_(pinned, non_blocking=True), pinned.nbytes)
    return found


def divided(args: argparse.Namespace, device: torch.device) -> CausalPolicy:
    """Return a policy with random weights as `ShardedStrategy` has it in a run."""
    from transformers import Qwen2Config

    shape = SHAPES["tiny" if args.tiny else args.shape]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Qwen2Config(**shape, max_position_embeddings=4096, dtype="bfloat16"), Path(folder))
        policy = CausalPolicy(
            folder,
            tokenizer=str(Path(folder) / "tokenizer"),
            dtype="fp32",
            random_weights=True,
            gradient_checkpointing=args.compute_again == "on",
        )
    strategy: Any = ShardedStrategy()
    strategy._device_mesh = init_device_mesh(device.type, (args.gpus,), mesh_dim_names=("data_parallel",))
    strategy.parallel_devices = [device]
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0)
    torch.manual_seed(0)
    with strategy.model_sharded_context():
        policy.configure()
    strategy.shard(policy)
    return policy


def passed(policy: CausalPolicy, sequences: int, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Return a forward and backward pass over so many completions."""
    batch = micro_batch(sequences, policy.config.vocab_size, args.tiny).to(device)

    def one() -> None:
        forward = policy(batch, 1.0, entropy=True)
        (-(forward.logprobs * batch.mask).sum() / batch.mask.sum()).backward()

    return one


def passes(policy: CausalPolicy, sequences: int, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return what a pass takes, gradients of an earlier one there."""
    one = passed(policy, sequences, args, device)
    one()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = timed(one, args.repeats, device)
    found["tokens"] = sequences * (8 if args.tiny else 512) + sequences // 8 * (12 if args.tiny else 200)
    found["tokens_per_second"] = round(1e3 * args.gpus * found["tokens"] / found["ms"])
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 1)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 1)
    return found


def step(policy: CausalPolicy, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return what AdamW takes on this process's parts, and GB of them."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    found = timed(optimizer.step, args.repeats, device)
    found["gigabytes"] = round(sum(own(parameter).nbytes for parameter in parameters) / 1e9, 2)
    optimizer.zero_grad()
    return found


def published(policy: CausalPolicy) -> Callable[[], None]:
    """Return the making of a publish: gathered, quantized, and with the sender's receipts."""
    format = formats.get("fp8_row")
    source = WeightSource(policy, format)

    def one() -> None:
        ledger = SentLedger(0, format)
        for _ in ledger.watch(source.whole(unchanged, torch.bfloat16)):
            pass
        ledger.receipts()

    return one


def profile(work: Callable[[], Any], name: str, args: argparse.Namespace, rank: int) -> None:
    """Print what some work spends its time on, on the host and on the device."""
    if not args.profile:
        return
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE.type == "cuda" else [])]
    with profiled(activities=activities) as seen:
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    if rank == 0:
        device = [one for one in ("self_device_time_total",) if DEVICE.type == "cuda"]
        for key in ("self_cpu_time_total", *device):
            print(f"{name} by {key}")
            print(seen.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60), flush=True)


if __name__ == "__main__":
    main(args)
