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
`--profile` adds, of one pass, the kernels and the operations on the host that take most of it.
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
    policy = CausalPolicy(
        str(folder),
        tokenizer=str(folder / "tokenizer"),
        dtype="bf16",
        lora=lora,
        random_weights=True,
        gradient_checkpointing=rest == "checkpoint",
        compile=rest == "compiled",
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
    if args.profile:
        profiled(one)
    return {
        "tokens": tokens,
        "ms": round(1e3 * seconds, 1),
        "new": None if first is None else round(1e3 * first, 1),
        "host": round(1e3 * statistics.median(host), 1),
        "first": round(warm_up, 1),
        "rate": round(operations / seconds / PEAK, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if DEVICE.type == "cuda" else None,
    }


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


def profiled(one: Any, most: int = 24) -> None:
    """Print a pass's kernels and the host's operations that take longest: milliseconds, calls, name."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE.type == "cuda")
    with profile(activities=kinds) as recorded:
        one()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    averages = recorded.key_averages()
    kernels = [(e.self_device_time_total / 1e3, e.count, e.key) for e in averages if e.device_type.name != "CPU"]
    host = [(e.self_cpu_time_total / 1e3, e.count, e.key) for e in averages]
    for what, rows in (("kernels", kernels), ("host, with the profiler's own time", host)):
        print(f"-- {what}: {sum(row[0] for row in rows):.1f} ms in {sum(row[1] for row in rows)} calls")
        for row in sorted(rows, reverse=True)[:most]:
            print(f"{row[0]:9.2f} {row[1]:6d}  {row[2][:150]}")
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            one()
        torch.cuda.set_sync_debug_mode("default")
        print(f"-- places where the host waits: {Counter(f'{w.filename}:{w.lineno}' for w in waits).most_common(12)}")


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
