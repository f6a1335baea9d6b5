"""What corrections, mismatch metrics and losses cost per mini-batch.

    python benchmarks/corrections.py --out corrections.json

Every line is measured as written and compiled (`lit_qrl.functional._compile`; on a CPU with `--compile` only), and on
a CUDA device with the number of kernels that it launches. There everything runs under
`torch.cuda.set_sync_debug_mode("error")`, so that a hidden wait for the device ends the benchmark. The line "all
corrections and mismatch metrics" is the sum of what one mini-batch could need, run back to back; losses, histogram and
n-grams are not compiled.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lit_qrl.callbacks.ais import AIS
from lit_qrl.callbacks.base import combine
from lit_qrl.callbacks.geometric import GeometricRejection
from lit_qrl.callbacks.masked import MaskedIS
from lit_qrl.callbacks.opsm import OffPolicySequenceMask
from lit_qrl.callbacks.truncated import TruncatedIS
from lit_qrl.callbacks.veto import TokenVeto
from lit_qrl.functional import diagnostics, objective
from lit_qrl.functional._compile import SWITCH
from lit_qrl.functional.importance import batch_normalized, log_ratio
from lit_qrl.functional.mismatch import mismatch_metrics
from lit_qrl.types import LossContext

WARM_UP = 3
CORRECTIONS = {
    "ais token": AIS(),
    "ais sequence": AIS(level="sequence"),
    "tis token": TruncatedIS(),
    "tis sequence": TruncatedIS("sequence"),
    "tis sequence, measured bound": TruncatedIS("sequence", upper="auto"),
    "tis geometric": TruncatedIS("geometric"),
    "tis token, no bound": TruncatedIS(upper=float("inf")),
    "mis token": MaskedIS(),
    "mis sequence": MaskedIS("sequence"),
    "mis geometric": MaskedIS("geometric"),
    "geometric rejection": GeometricRejection(),
    "token veto": TokenVeto(),
    "off-policy sequence mask": OffPolicySequenceMask(0.05),
}


def mini_batch(b: int, t: int, device: torch.device) -> LossContext:
    """Return a mini-batch with the mismatch of an FP8 sampler: |log-ratio| of 0.02, ragged lengths, fp32."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(t // 4, t + 1, (b,), generator=generator)
    mask = torch.arange(t) < lengths[:, None]
    sampler = -torch.empty(b, t).exponential_(1.0, generator=generator)
    learner = sampler + 0.025 * torch.randn(b, t, generator=generator)
    advantages = torch.randn(b, generator=generator)
    learner, sampler, mask, advantages = (x.to(device) for x in (learner, sampler, mask, advantages))
    return LossContext(
        learner_old=learner,
        sampler=sampler,
        log_ratio=log_ratio(learner, sampler, mask),
        mask=mask,
        advantages=advantages,
        version=torch.zeros(b, dtype=torch.long, device=device),
    )


def jobs(context: LossContext) -> dict:
    """Return what is timed, by name; the first group is what the bound of 2 ms is about."""
    learner, sampler, mask, advantages = context.learner_old, context.sampler, context.mask, context.advantages
    tokens = (sampler * 1e4).long() % 50_000
    timed = {name: lambda c=c: c.correct(None, None, context) for name, c in CORRECTIONS.items()}  # pyright: ignore
    parts = [correction() for correction in (timed["ais token"], timed["geometric rejection"], timed["token veto"])]
    timed["composition of three"] = lambda: combine(parts, mask)
    timed["normalisation"] = lambda: batch_normalized(parts[0].weights, mask)
    timed["mismatch metrics"] = lambda: mismatch_metrics(learner, sampler, mask)
    everything = list(timed.values())
    timed["all corrections and mismatch metrics"] = lambda: [job() for job in everything]
    for name in ("clipped_surrogate", "gspo", "sapo", "cispo"):
        loss = getattr(objective, name)
        timed[f"loss {name}"] = lambda loss=loss: loss(learner, sampler, advantages, mask)
    timed["loss tbpo"] = lambda: objective.tbpo(learner, sampler, advantages, mask, context.log_ratio)
    timed["histogram"] = lambda: diagnostics.histogram2d_by_sign(context.log_ratio, sampler, mask, advantages)
    timed["repeated 4-grams"] = lambda: diagnostics.repeated_ngrams(tokens, mask)
    return timed


def median_ms(job, device: torch.device, repeats: int) -> float:
    """Return the median wall time of a job in ms, from launch to the end of its last kernel."""
    times = []
    for _ in range(WARM_UP):  # compiles, and builds caches
        job()
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        start = time.perf_counter()
        job()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def kernel_count(job, device: torch.device) -> int | None:
    """Return how many kernels a job launches on a CUDA device."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        job()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events() or ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="sequences in the mini-batch")
    parser.add_argument("--length", type=int, default=2048, help="completion tokens of each")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="measure compiled statistics on a CPU too")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    modes = {"eager": "0"} if device.type == "cpu" and not args.compile else {"eager": "0", "compiled": "1"}
    print(f"b = {args.batch}, t = {args.length}, fp32, {machine}, torch {torch.__version__}")
    print(f"median of {args.repeats} runs\n")
    print(f"{'':<40} " + " ".join(f"{mode + ' ms':>12} {'kernels':>8}" for mode in modes))
    results: dict[str, dict[str, dict[str, float | int | None]]] = {}
    with torch.no_grad():
        for name, job in jobs(mini_batch(args.batch, args.length, device)).items():
            results[name] = {}
            line = f"{name:<40}"
            for mode, switch in modes.items():
                os.environ[SWITCH] = switch
                ms, kernels = median_ms(job, device, args.repeats), kernel_count(job, device)
                results[name][mode] = {"ms": ms, "kernels": kernels}
                line += f" {ms:>12.3f} {'-' if kernels is None else kernels:>8}"
            print(line, flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "batch": args.batch,
            "length": args.length,
            "machine": machine,
            "torch": torch.__version__,
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
