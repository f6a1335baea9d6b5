"""One forward and backward pass of a policy on one GPU, whole: milliseconds, share of the GPU's rate, peak memory.

    python benchmarks/passes.py --shapes 1.5b --arms full full-checkpoint --sequences 16 32
    python benchmarks/passes.py --shapes 7b --arms lora lora-fp8_row lora-fp8_row-dequantize lora-fp8_block lora-nvfp4
    python benchmarks/passes.py --shapes 1.5b 7b --arms full unified qat-fp8_row --sequences 8 --profile --out out.json

The policy is the one of a run, with random weights of Qwen2.5's shapes and its precision plugin; a micro-batch has so
many completions of 512 tokens, eight to a prompt of 200 that they share. Gradients are there already, as in every pass
of a step but the first, and three passes are queued one behind another. `host` is the time until one is queued: where
it is the pass's own, the GPU waits for launches.
`rate` is 6 operations a parameter and token (4 under an adapter, whose base has no gradient) of 989 TFLOP/s.

full             all weights trained, bf16
full-checkpoint  all layers computed again
full-compiled    decoder layers compiled by torch; `start` does not hold what the first passes take, `first` does
lora             LoRA of rank 32 over bf16
lora-FORMAT      the same over a base that `PackedLoRA` holds in FORMAT; with `-dequantize` multiplied out
unified          all weights trained, `UnifiedFP8`; with `-plain` its inputs quantized by kernels of their own
qat-FORMAT       all weights trained, `QATAligned` in FORMAT; with `-high` its backward pass over unrounded operands

`new` is a pass whose weights have just been written, as in the first pass of a step: a plugin quantizes them anew.
`--profile` adds, of one pass, what takes most of it: kinds of kernels, kernels, the operations that start them with
their shapes, operations on the host, and where the GPU waits. `--steps` adds the optimizer's step as a run has it, over
fp32 masters and without, with the norm of the gradients before: what an update takes beside its passes.
An arm that fails leaves the others' figures. `--tiny` tries every line on a CPU.
"""

import argparse
import gc
import json
import random
import re
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from iteration import SHAPES  # noqa: E402
from liger_policy import CompiledPolicy  # noqa: E402
from qerl import write_model  # noqa: E402

from lit_qrl.loop.batching import assemble  # noqa: E402
from lit_qrl.network.padding_free import laid_out  # noqa: E402
from lit_qrl.policy import CausalPolicy  # noqa: E402
from lit_qrl.precision import PackedLoRA, QATAligned, UnifiedFP8  # noqa: E402
from lit_qrl.types import Completion  # noqa: E402

PEAK = 989e12
PROMPT, COMPLETION, GROUP = 200, 512, 8
ARMS = r"full(-checkpoint|-compiled)?|lora(-\w+(-dequantize)?)?|unified(-plain)?|qat-\w+(-high)?"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Holder(nn.Module):
    """What a precision plugin converts: a module with a policy."""

    def __init__(self, policy: CausalPolicy) -> None:
        super().__init__()
        self.policy = policy


def learner(shape: str, arm: str, folder: Path) -> tuple[CausalPolicy, Any]:
    """Return a policy of that shape, as a run has it on the device, and its precision plugin."""
    from lightning.pytorch.plugins.precision import HalfPrecision
    from peft import LoraConfig
    from transformers import Qwen2Config

    if not re.fullmatch(ARMS, arm):
        raise ValueError(f"There is no such arm: {arm}.")
    if not (folder / "config.json").exists():
        write_model(Qwen2Config(**SHAPES[shape], max_position_embeddings=4096, dtype="bfloat16"), folder)
    kind, _, rest = arm.partition("-")
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear") if kind == "lora" else None
    format = rest.removesuffix("-dequantize")
    kernel = "dequantize" if rest.endswith("-dequantize") else "auto"
    plugin: Any = HalfPrecision("bf16-true")
    if kind == "lora" and format:
        plugin = PackedLoRA(format, autocast="bf16", kernel=kernel)
    elif kind == "unified":
        plugin = UnifiedFP8(fuse=False if rest == "plain" else "auto")
    elif kind == "qat":
        high = rest.endswith("-high")
        plugin = QATAligned(rest.removesuffix("-high"), backward="high_precision" if high else "dequantized")
    policy = (CompiledPolicy if rest == "compiled" else CausalPolicy)(
        str(folder),
        tokenizer=str(folder / "tokenizer"),
        dtype="bf16",
        lora=lora,
        random_weights=True,
        gradient_checkpointing=rest == "checkpoint",
    )
    with DEVICE, plugin.module_init_context():
        policy.configure()
    if isinstance(plugin, PackedLoRA):
        plugin.configure_policy(policy)
    plugin.convert_module(Holder(policy).to(DEVICE))
    return policy, plugin


def micro_batch(sequences: int, vocabulary: int, tiny: bool) -> Any:
    """Return random completions of one length, eight to a prompt."""
    draw = random.Random(0)
    prompt, completion = (12, 8) if tiny else (PROMPT, COMPLETION)

    def words(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    prompts = [words(prompt) for _ in range(sequences // GROUP)]
    drawn = [
        Completion(token_ids=words(completion), logprobs=[-1.0] * completion, finish_reason="length", version=0)
        for _ in range(sequences)
    ]
    return assemble(prompts, drawn, GROUP, 0).to(DEVICE)


def measured(policy: CausalPolicy, plugin: Any, sequences: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of passes over one micro-batch."""
    batch = laid_out(policy.network, micro_batch(sequences, policy.config.vocab_size, args.tiny))
    lengths = batch.total_length - batch.prompt_length
    tokens = int(lengths.sum() + batch.prompt_length[::GROUP].sum())

    def one() -> None:
        with plugin.forward_context():
            forward = policy(batch, 1.0, entropy=True)
            loss = -(forward.logprobs * batch.mask).sum() / batch.mask.sum()
        loss.backward()

    def wait() -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    wait()
    began = time.perf_counter()
    one()
    wait()
    warm_up = time.perf_counter() - began
    one()
    first = fresh(policy, one, wait) if isinstance(plugin, QATAligned | UnifiedFP8) else None
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    whole, host = [], []
    for _ in range(args.repeats):
        wait()
        start = time.perf_counter()
        one()
        host.append(time.perf_counter() - start)
        one()
        one()
        wait()
        whole.append((time.perf_counter() - start) / 3)
    seconds = statistics.median(whole)
    count = sum(p.numel() for p in policy.parameters()) if policy.lora is None else weights_of(policy)
    operations = (6 if policy.lora is None else 4) * count * tokens
    figures = {
        "tokens": tokens,
        "ms": round(1e3 * seconds, 1),
        "new": None if first is None else round(1e3 * first, 1),
        "host": round(1e3 * statistics.median(host), 1),
        "first": round(warm_up, 1),
        "rate": round(operations / seconds / PEAK, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if DEVICE.type == "cuda" else None,
    }
    if args.profile:
        print(figures, flush=True)
        try:
            profiled(one)
        except Exception:  # which leaves the figures
            traceback.print_exc()
    return figures


def fresh(policy: CausalPolicy, one: Any, wait: Any) -> float:
    """Return the seconds of a pass after all weights have been written."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.0)
    wait()
    start = time.perf_counter()
    one()
    wait()
    return time.perf_counter() - start


def profiled(one: Any, most: int = 28) -> None:
    """Print where the time of a pass goes: kinds of kernels, kernels, what starts them, the host, waits of the GPU."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE.type == "cuda")
    with profile(activities=kinds, record_shapes=True, with_flops=True) as recorded:
        one()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    shaped, averages = recorded.key_averages(group_by_input_shape=True), recorded.key_averages()
    host = [(e.self_cpu_time_total / 1e3, e.count, e.key) for e in averages if e.device_type.name == "CPU"]
    table("host, with the profiler's own time", host, most)
    if DEVICE.type != "cuda":
        return
    kernels = [(e.self_device_time_total / 1e3, e.count, e.key) for e in averages if e.device_type.name != "CPU"]
    table("kernels", kernels, most)
    started = [(e.self_device_time_total / 1e3, e.count, e) for e in shaped if e.device_type.name == "CPU"]
    table("what starts them, with its shapes", [(ms, count, described(e, ms)) for ms, count, e in started], most)
    idle(recorded)
    sums: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for ms, count, name in kernels:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")
        sums[kind] += ms
        calls[kind] += count
    products = sum(e.flops for e in averages if e.device_type.name == "CPU" and e.flops)
    table("kinds of kernels", [(sums[kind], calls[kind], kind) for kind in sums], most)
    if sums["matrix products"]:
        print(f"-- matrix products: {products / sums['matrix products'] / 1e9:.0f} TFLOP/s", flush=True)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        one()
    torch.cuda.set_sync_debug_mode("default")
    print(f"-- places where the host waits: {Counter(f'{w.filename}:{w.lineno}' for w in waits).most_common(12)}")


KINDS = {
    "matrix products": r"nvjet|gemm|cutlass(?!.*(flash|fmha))|xmma|cublas|splitK",
    "attention": r"flash|fmha|sdpa|cudnn|varlen",
    "norms": r"norm|squares",
    "gated MLP": r"gated|^_tiles_kernel",
    "rotary": r"rotate",
    "gathers": r"summed|returned|index|gather|scatter|embedding|sort|Sort|radix|unique",
    "log-probs": r"_reduce_kernel|_gradient_kernel",
    "quantizing": r"fp8|e4m3|quant|rows_kernel|blocks_kernel|values_kernel",
    "sums of tensors": r"reduce_kernel",
    "additions": r"CUDAFunctor_add|AddFunctor|add_kernel",
    "copies and fills": r"copy|Memcpy|Memset|fill|Fill|CatArray",
    "other elementwise": r"elementwise",
}
"""Patterns of kernels' names; the first that fits counts."""


def table(what: str, rows: list[tuple[float, int, str]], most: int) -> None:
    """Print rows of milliseconds, calls and name, the longest first."""
    print(f"-- {what}: {sum(row[0] for row in rows):.1f} ms in {sum(row[1] for row in rows)} calls")
    for ms, calls, name in sorted(rows, reverse=True)[:most]:
        if ms > 0:
            print(f"{ms:9.2f} {calls:6d}  {name[:150]}")
    sys.stdout.flush()


def described(event: Any, ms: float) -> str:
    """Return an operation's name with the shapes that it got and, of a product, its rate."""
    shapes = " ".join("×".join(map(str, shape)) for shape in event.input_shapes if shape)
    rate = f"  {event.flops / ms / 1e9:.0f} TFLOP/s" if event.flops and ms else ""
    return f"{event.key[:60]} {shapes[:70]}{rate}"


def idle(recorded: Any, least: int = 3_000, most: int = 12) -> None:
    """Print how long no kernel ran between the first and the last, and between which kernels that was."""
    events = recorded.profiler.kineto_results.events()
    spans = sorted(
        (e.start_ns(), e.end_ns(), e.name())
        for e in events
        if e.device_type().name == "CUDA" and not e.is_user_annotation()
    )
    if not spans:
        return
    gaps: list[tuple[float, str]] = []
    end, last = spans[0][1], spans[0][2]
    for start, stop, name in spans:
        if start - end >= least:
            gaps.append(((start - end) / 1e6, f"{last[:60]} -> {name[:60]}"))
        if stop > end:
            end, last = stop, name
    whole = (end - spans[0][0]) / 1e6
    print(f"-- the GPU waits {sum(gap for gap, _ in gaps):.1f} of {whole:.1f} ms, {len(gaps)} times")
    between: dict[str, list[float]] = {}
    for gap, where in gaps:
        between.setdefault(where, []).append(gap)
    for where, found in sorted(between.items(), key=lambda one: -sum(one[1]))[:most]:
        print(f"{sum(found):9.2f} {len(found):6d}  {where}")


def steps_of(policy: CausalPolicy, repeats: int) -> dict[str, Any]:
    """Return the milliseconds of a step: the norm of the gradients, AdamW over fp32 masters and without."""
    from lit_qrl.optim.masters import trained_by

    trained = [(name, one) for name, one in policy.named_parameters() if one.requires_grad]
    found: dict[str, Any] = {}

    def timed(work: Any) -> float:
        seconds = []
        for _ in range(repeats):
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return round(1e3 * statistics.median(seconds), 1)

    for _, parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    found["norm_ms"] = timed(lambda: nn.utils.clip_grad_norm_([one for _, one in trained], 1.0))
    for masters in (True, False):
        optimizer = trained_by(torch.optim.AdamW, trained, masters)
        found["step_masters_ms" if masters else "step_ms"] = timed(optimizer.step)
        del optimizer
    return found


def weights_of(policy: CausalPolicy) -> int:
    """Return how many weights the base's linear layers have."""
    layers = (getattr(module, "base_layer", None) for module in policy.modules())
    return sum(layer.out_features * layer.in_features for layer in layers if layer is not None)


def main() -> None:
    """Measure every arm and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5b"], choices=sorted(SHAPES))
    parser.add_argument("--arms", nargs="+", default=["full"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[16], help="of a micro-batch, a multiple of 8")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="also print what one pass spends its time on")
    parser.add_argument("--steps", action="store_true", help="also time the optimizer's step")
    parser.add_argument("--tiny", action="store_true", help="a toy shape and short completions")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape in ["tiny"] if args.tiny else args.shapes:
            for arm in args.arms:
                rows += of_arm(shape, arm, Path(temporary) / shape, args)
                if args.out:
                    args.out.write_text(json.dumps(rows, indent=1))
    columns = (
        "shape",
        "arm",
        "sequences",
        "tokens",
        "ms",
        "new",
        "host",
        "rate",
        "peak_gib",
        "start",
        "first",
        "norm_ms",
        "step_masters_ms",
        "step_ms",
        "error",
    )
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(str(row.get(column, "")) for column in columns))


def of_arm(shape: str, arm: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one arm, what went wrong among them."""
    rows: list[dict[str, Any]] = []
    policy = plugin = None
    try:
        began = time.perf_counter()
        torch.manual_seed(0)
        policy, plugin = learner(shape, arm, folder)
        start = round(time.perf_counter() - began, 1)
        for sequences in args.sequences:
            what = {"shape": shape, "arm": arm, "sequences": sequences, "start": start}
            rows.append({**what, **measured(policy, plugin, sequences, args)})
            print(rows[-1], flush=True)
        if args.steps:
            rows.append({"shape": shape, "arm": arm, **steps_of(policy, args.repeats)})
            print(rows[-1], flush=True)
    except Exception as error:
        rows.append({"shape": shape, "arm": arm, "error": f"{type(error).__name__}: {error}"[:200]})
        traceback.print_exc()
    finally:
        del policy, plugin
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
