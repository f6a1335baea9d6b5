"""What corrections, mismatch metrics and losses cost per mini-batch.

    python benchmarks/corrections.py --out corrections.json

Every line is the wall time from the first launch to the end of the last kernel, and on a CUDA device the number of
kernels and the time that they themselves take. The rest is Python and launches, which a busy device hides. There
everything runs under `torch.cuda.set_sync_debug_mode("error")`, so that a hidden wait for the device is seen.

A second table holds what a mini-batch costs: each correction with all mismatch metrics, the longest composition that a
run may have (a weight, every rejection, their product, normalisation), and, though no run has it, all corrections with
the metrics.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lit_qrl.callbacks.ais import AIS
from lit_qrl.callbacks.rejection import GeometricRejection, OffPolicySequenceMask, TokenVeto
from lit_qrl.callbacks.truncated import MaskedIS, TruncatedIS
from lit_qrl.functional import diagnostics, objective
from lit_qrl.functional.importance import batch_normalized, log_ratio
from lit_qrl.functional.mismatch import mismatch_metrics
from lit_qrl.loop.correction import combine
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

REJECTIONS = ("geometric rejection", "token veto", "off-policy sequence mask")


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
    """Return what is timed alone, by name."""
    learner, sampler, mask, advantages = context.learner_old, context.sampler, context.mask, context.advantages
    tokens = (sampler * 1e4).long() % 50_000
    timed = {name: lambda c=c: c.correct(None, None, context) for name, c in CORRECTIONS.items()}  # pyright: ignore
    parts = [timed[name]() for name in ("ais token", "geometric rejection", "token veto")]
    timed["composition of three"] = lambda: combine(parts, mask)
    timed["normalisation"] = lambda: batch_normalized(parts[0].weights, mask)
    timed["mismatch metrics"] = lambda: mismatch_metrics(learner, sampler, mask)
    for name in ("clipped_surrogate", "gspo", "sapo", "cispo"):
        loss = getattr(objective, name)
        timed[f"loss {name}"] = lambda loss=loss: loss(learner, sampler, advantages, mask)
    timed["loss tbpo"] = lambda: objective.tbpo(learner, sampler, advantages, mask, context.log_ratio)
    timed["histogram"] = lambda: diagnostics.histogram2d_by_sign(context.log_ratio, sampler, mask, advantages)
    timed["repeated 4-grams"] = lambda: diagnostics.repeated_ngrams(tokens, mask)
    return timed


def mini_batch_jobs(context: LossContext) -> dict:
    """Return what a mini-batch may have to pay for, by name."""
    learner, sampler, mask = context.learner_old, context.sampler, context.mask

    def run(*names: str) -> list:
        return [CORRECTIONS[name].correct(None, None, context) for name in names]  # pyright: ignore

    def measured(*names: str) -> None:
        run(*names)
        mismatch_metrics(learner, sampler, mask)

    def composed() -> None:
        weights, _, _ = combine(run("ais token", *REJECTIONS), mask)
        batch_normalized(weights, mask)
        mismatch_metrics(learner, sampler, mask)

    timed = {f"{name} + metrics": lambda name=name: measured(name) for name in CORRECTIONS}
    timed["ais, all rejections, product, normalised + metrics"] = composed
    timed["all corrections + metrics"] = lambda: measured(*CORRECTIONS)
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


def kernels(job, device: torch.device) -> tuple[int | None, float | None]:
    """Return how many kernels a job launches on a CUDA device, and the ms that they take themselves."""
    if device.type != "cuda":
        return None, None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        job()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(events), sum(event.time_range.elapsed_us() for event in events) / 1e3


def measure(timed: dict, device: torch.device, repeats: int) -> dict:
    """Return ms, kernels and the kernels' own ms of each job, and print them."""
    print(f"{'':<52}{'ms':>9}{'kernels':>9}{'of ms':>8}")
    results: dict = {}
    for name, job in timed.items():
        try:
            ms = median_ms(job, device, repeats)
            count, own = kernels(job, device)
        except RuntimeError as error:  # a hidden synchronisation: say where, and go on with the others
            results[name] = {"error": str(error)}
            print(f"{name}: {str(error).partition(chr(10))[0]}", flush=True)
            continue
        results[name] = {"ms": ms, "kernels": count, "kernel_ms": own}
        shown = f"{'-' if count is None else count:>9}{'-' if own is None else format(own, '.3f'):>8}"
        print(f"{name:<52}{ms:>9.3f}{shown}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="sequences in the mini-batch")
    parser.add_argument("--length", type=int, default=2048, help="completion tokens of each")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    print(f"b = {args.batch}, t = {args.length}, fp32, {machine}, torch {torch.__version__}")
    print(f"median of {args.repeats} runs\n")
    record: dict = {"batch": args.batch, "length": args.length, "machine": machine, "torch": torch.__version__}
    context = mini_batch(args.batch, args.length, device)
    with torch.no_grad():
        record["results"] = measure(jobs(context), device, args.repeats)
        print("\nA mini-batch")
        record["mini_batch"] = measure(mini_batch_jobs(context), device, args.repeats)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
