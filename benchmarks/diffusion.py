"""Masked-diffusion rollouts: FP8 against bf16, each phase of a step, and what keeping keys and values changes.

    python benchmarks/diffusion.py --out out.json

LLaDA-8B's shape with random weights, completions of 256 tokens in blocks of 32, two tokens unmasked in each step. For
each (batch, G), as in the AIS paper's Table 6, whose figures are printed beside: seconds of generation, of the
sampler's log-probs of what it drew, and peak memory, in bf16 and in FP8 with one dynamic scale per tensor. `plain` is
LLaDA's published loop in bf16 (a full forward per step with the library's modules, noise and probabilities of all
positions in fp64, no early stop). Weights of the samplers are their own, as they are where an adapter is merged.
For the first shape: with keys and values kept; the same without graphs, by the library's forward, and over the
learner's own weights; products by themselves; and where a step's time goes. `WRONG` marks other tokens where there
should be the same.

Each line is printed when it is measured, after a warm-up of two blocks; for the first shape it is the median of
`--repeats`. `--tiny` tries every line on a CPU; its figures mean nothing but the differences of `--model`, a folder
with trained weights for 4×4 Sudoku.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn.functional import ScalingType, scaled_mm  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from lit_qrl import formats  # noqa: E402
from lit_qrl.data.tasks.sudoku import Sudoku  # noqa: E402
from lit_qrl.formats.kernels import dispatch  # noqa: E402
from lit_qrl.loop.batching import assemble  # noqa: E402
from lit_qrl.network.adapters import merged_weights  # noqa: E402
from lit_qrl.network.denoising import Estimator  # noqa: E402
from lit_qrl.network.linears import quantizable_linears  # noqa: E402
from lit_qrl.network.llada import LLaDAConfig  # noqa: E402
from lit_qrl.network.stream import weight_stream  # noqa: E402
from lit_qrl.rollout import DiffusionEngine  # noqa: E402
from lit_qrl.rollout.diffusion.stack import Stack  # noqa: E402
from lit_qrl.rollout.engine import SamplerSpec  # noqa: E402
from lit_qrl.types import SamplingParams  # noqa: E402

LLADA = {
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
TINY = {**LLADA, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128}
TINY |= {"vocab_size": 64, "embedding_size": 64, "mask_token_id": 63, "max_sequence_length": 128}
TABLE_6 = {
    (4, 4): (46.96, 16.57, 50.94, 53.98),
    (8, 4): (39.03, 16.13, 61.07, 62.41),
    (8, 8): (28.20, 17.76, 60.63, 62.02),
    (16, 4): (50.54, 43.41, 62.85, 63.88),
    (16, 8): (47.72, 34.87, 61.07, 62.41),
}
"""(batch, G), so many sequences at a time in groups of G: the paper's seconds of generation and GB, bf16 and FP8."""
BOTH: tuple[dict[str, Any], ...] = (
    {"variant": "bf16"},
    {"variant": "fp8_tensor", "format": "fp8_tensor"},
    {"variant": "bf16, reuse prompt", "reuse": "prompt"},
    {"variant": "fp8_tensor, reuse prompt", "format": "fp8_tensor", "reuse": "prompt"},
    {"variant": "bf16, reuse blocks", "reuse": "blocks"},
    {"variant": "fp8_tensor, reuse blocks", "format": "fp8_tensor", "reuse": "blocks"},
)
MORE: tuple[dict[str, Any], ...] = (
    {"variant": "bf16, launched", "graphs": False},
    {"variant": "fp8_tensor, launched", "format": "fp8_tensor", "graphs": False},
    {"variant": "bf16, library's forward", "graphs": False, "library": True},
    {"variant": "fp8_tensor, library's forward", "format": "fp8_tensor", "graphs": False, "library": True},
    {"variant": "bf16, the learner's weights", "share": "auto"},
    {"variant": "fp8_row", "format": "fp8_row"},
)
SAME = {"bf16, launched": "bf16", "fp8_tensor, launched": "fp8_tensor"}
"""Variants that draw the same tokens as another, of which the comparison is with bf16."""


PARTS = ("shapes", "more", "products", "kernels")


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a policy for Sudoku; without it, LLaDA-8B's shape at random")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=[f"{b},{g}" for b, g in TABLE_6], metavar="BATCH,G")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="shapes: every shape's lines")
    parser.add_argument("--variants", nargs="+", help="of those of every shape, such as plain bf16 fp8_tensor")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the median seconds of some work, and what it returned last."""
    result, seconds = None, []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        result = work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def engine_of(network: Any, format: Any, spec: SamplerSpec, **options: Any) -> DiffusionEngine:
    """Return an engine that holds the network's weights in a format."""
    engine = DiffusionEngine(**options)
    engine.setup(spec, SimpleNamespace(network=network))
    layers = list(quantizable_linears(network)) if format is not None else []
    engine.load_weights(weight_stream(merged_weights(network), format, layers), format, 0)
    return engine


@torch.inference_mode()
def plain_loop(network: Any, prompts: list[list[int]], length: int, block: int, blocks: int) -> torch.Tensor:
    """Decode as LLaDA's `generate.py` does (ML-GSAI/LLaDA at 41760b9), for several rows.

    A full forward at every step; noise and probabilities of all logits in fp64. Only the first `blocks` are decoded.
    """
    device, mask = network.get_input_embeddings().weight.device, network.config.mask_token_id
    prompt = torch.tensor(prompts, device=device)
    canvas = torch.cat([prompt, torch.full((len(prompts), length), mask, device=device)], dim=1)
    width = prompt.shape[1]
    for start in range(width, width + blocks * block, block):
        for _ in range(block // 2):
            logits = network(canvas, use_cache=False).logits
            wide = logits.to(torch.float64)
            drawn = (wide.exp() / (-torch.rand_like(wide).log()) ** 0.9).argmax(-1)
            del wide
            sure = logits.to(torch.float64).softmax(-1).gather(-1, drawn[..., None])[..., 0]
            open_ = canvas == mask
            open_[:, start + block :] = False
            sure = torch.where(open_, sure, -1.0)
            for row in range(len(canvas)):
                chosen = sure[row].topk(2).indices
                canvas[row, chosen] = drawn[row, chosen]
    return canvas[:, width:]


class Bench:
    """A network, the lengths that are drawn, and the lines that were measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if options.model:
            network = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        else:
            with device:
                config = LLaDAConfig.from_dict(TINY if options.tiny else LLADA)
                network = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.network, self.device = network.to(device).eval(), device
        self.drawn: dict[tuple[int, int, str], list[Any]] = {}
        self.rows: list[dict[str, Any]] = []

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        """Return random prompts, of a trained model Sudoku's."""
        if self.options.model:
            task = Sudoku(prompt_format="short", train_size=1, evaluation_size=count)
            task.setup()
            tokenizer = AutoTokenizer.from_pretrained(self.options.model)
            return [tokenizer(str(task.prompt(row))).input_ids for row in task.evaluation_rows()]
        words = min(self.network.config.mask_token_id, 60_000)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(4, words, (count, self.options.prompt), generator=generator).tolist()

    def tell(self, row: dict[str, Any]) -> None:
        """Print a line and keep it."""
        print(
            json.dumps({key: round(one, 4) if isinstance(one, float) else one for key, one in row.items()}), flush=True
        )
        self.rows.append(row)
        if self.options.out:
            self.options.out.write_text(json.dumps(self.rows, indent=1) + "\n")

    def plain(self, prompts: list[list[int]], group: int) -> dict[str, Any]:
        """Return the published loop's seconds: of a quarter of the blocks, times four, since its steps are alike."""
        flat, length, block = [one for one in prompts for _ in range(group)], self.options.length, self.options.block
        blocks = max(length // block // 4, 1)
        plain_loop(self.network, flat, length, block, 1)
        seconds, _ = timed(lambda: plain_loop(self.network, flat, length, block, blocks), self.options.repeats)
        return {"generate": seconds * (length // block) / blocks}

    def engine(
        self,
        prompts: list[list[int]],
        group: int,
        format: str | None = None,
        reuse: Any = "none",
        graphs: bool = True,
        library: bool = False,
        share: Any = "never",
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return an engine's seconds of each phase, and what it drew."""
        options = self.options
        sampling = SamplingParams(max_tokens=options.length, temperature=0.9)
        spec = SamplerSpec(sampling=sampling, estimator=Estimator())
        chosen = None if format is None else formats.get(format)
        engine = engine_of(self.network, chosen, spec, block=options.block, reuse=reuse, graphs=graphs, share=share)
        with patch.object(Stack, "of", return_value=None) if library else nullcontext():
            engine.generate(prompts, group, 0, sampling=replace(sampling, max_tokens=2 * options.block))
            seconds, drawn = timed(lambda: engine.generate(prompts, group, 0), options.repeats)
        rollout = assemble(prompts, drawn, group, 0).to(self.device)
        engine.estimate(rollout)
        scoring, _ = timed(lambda: engine.estimate(rollout), 3)
        row: dict[str, Any] = {"generate": seconds - scoring, "log-probs": scoring}
        if engine.graphs is not None:
            row["replayed"] = engine.graphs.checked and not engine.graphs.broken
        row["ms of a step"] = row["generate"] * 2e3 / options.length
        engine.close()
        return row, drawn

    def kernels(self, batch: int, format: str | None, count: int = 14) -> dict[str, Any]:
        """Return ms of a launched step over a whole canvas: in all, on the device, and the longest kernels and calls.

        The prompt is so long that one block fills the canvas, and the block is decoded.
        """
        from torch.profiler import ProfilerActivity, profile

        options = self.options
        words = min(self.network.config.mask_token_id, 60_000)
        prompts = torch.randint(4, words, (1, options.prompt + options.length - options.block)).tolist()
        sampling = SamplingParams(max_tokens=options.block, temperature=0.9)
        spec = SamplerSpec(sampling=sampling, estimator=Estimator())
        chosen = None if format is None else formats.get(format)
        found: dict[str, Any] = {}
        steps = options.block // 2
        for graphs in (True, False):
            engine = engine_of(self.network, chosen, spec, block=options.block, share="never", graphs=graphs)
            engine.generate(prompts, batch, 0)
            seconds, _ = timed(lambda e=engine: e.generate(prompts, batch, 0), 2)
            found["replayed" if graphs else "launched"] = seconds * 1e3 / steps
            if graphs:
                engine.close()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            engine.generate(prompts, batch, 0)
            synchronize()
        engine.close()
        averages = list(profiler.key_averages())
        device = [one for one in averages if one.device_type != torch.autograd.DeviceType.CPU]
        found["device"] = sum(one.self_device_time_total for one in device) / 1e3 / steps
        found["kernels of a step"] = sum(one.count for one in device) / steps
        for events, field in ((device, "self_device_time_total"), (averages, "self_cpu_time_total")):
            longest = sorted(events, key=lambda one: getattr(one, field), reverse=True)[:count]
            for one in longest:
                what = f"{'cpu ' * (field == 'self_cpu_time_total')}{one.key[:90]}"
                found[what] = f"{getattr(one, field) / 1e3 / steps:.3f} ms, {one.count / steps:.1f} times"
        return found

    def products(self, batch: int) -> dict[str, Any]:
        """Return µs of LLaDA's products of a whole canvas, in bf16 and in FP8, summed exactly and fast.

        Layers that read the same input are multiplied by themselves, and as one: q, k, v; gate and up.
        """
        m = batch * (self.options.prompt + self.options.length)
        options = {"scale_recipe_a": ScalingType.TensorWise, "scale_recipe_b": ScalingType.TensorWise}
        options |= {"output_dtype": torch.bfloat16}
        found: dict[str, Any] = {}
        for name, k, n in (
            ("q", 4096, 4096), ("qkv", 4096, 12288), ("gate", 4096, 12288), ("gate, up", 4096, 24576),
            ("down", 12288, 4096),
        ):  # fmt: skip
            a, b = torch.randn(m, k, device=self.device).bfloat16(), torch.randn(n, k, device=self.device).bfloat16()
            (x, scale_x), (w, scale_w) = dispatch.e4m3_inputs(a, False), dispatch.e4m3_inputs(b, False)
            scales = {"scale_a": scale_x, "scale_b": scale_w, **options}
            work: dict[str, Callable[[], Any]] = {
                "bf16": lambda a=a, b=b: a @ b.t(),
                "fp8": lambda x=x, w=w, s=scales: scaled_mm(x, w.t(), **s),
                "fp8 fast": lambda x=x, w=w, s=scales: scaled_mm(x, w.t(), use_fast_accum=True, **s),
                "codes": lambda a=a: dispatch.e4m3_inputs(a, False),
            }
            for kind, one in work.items():
                one()
                found[f"{name}, {kind}"] = timed(lambda one=one: [one() for _ in range(30)], 3)[0] / 30 * 1e6
        return found

    def measure(self, row: dict[str, Any], work: Callable[[], tuple[dict[str, Any], Any]]) -> Any:
        """Print what some work measured with its peak memory, or its error; return what it drew."""
        drawn = None
        if self.device.type == "cuda":
            gc.collect()  # the modules of an engine before refer to one another
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found, drawn = work()
            row |= found
        except Exception as error:  # the other lines are still worth having
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        if self.device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.tell(row)
        return drawn


def main() -> None:
    """Measure and print one JSON object per line, and the speed-ups last."""
    options = parse()
    if options.tiny:
        options.length, options.block, options.prompt = 16, 8, 8
    bench = Bench(options)
    shapes = [(int(batch), int(group)) for batch, group in (one.split(",") for one in options.shapes)]
    chosen = options.variants or ["plain", *(one["variant"] for one in BOTH)]
    if "shapes" in options.parts:
        for batch, group in shapes:
            first = (batch, group) == shapes[0]
            variants = tuple(one for one in BOTH if one["variant"] in chosen and (first or "reuse" not in one))
            compare(bench, batch, group, variants, "plain" in chosen)
            options.repeats = 1
    batch, group = shapes[0]
    shape = {"batch": batch, "G": group}
    if "more" in options.parts:
        compare(bench, batch, group, BOTH[:2] * ("shapes" not in options.parts) + MORE)
    if bench.device.type == "cuda" and "products" in options.parts:
        for rows in dict.fromkeys(batch for batch, _ in shapes):
            bench.measure({"batch": rows, "G": 0, "variant": "µs"}, lambda r=rows: (bench.products(r), None))
    if bench.device.type == "cuda" and "kernels" in options.parts:
        for name in (None, "fp8_tensor"):
            row = {**shape, "variant": f"kernels, {name or 'bf16'}"}
            bench.measure(row, lambda f=name: (bench.kernels(batch, f), None))
    table(bench.rows)


def compare(bench: Bench, batch: int, group: int, variants: tuple[dict[str, Any], ...], plain: bool = False) -> None:
    """Measure variants, and the published loop, on the same prompts."""
    prompts = bench.prompts(max(batch // group, 1), batch)
    group = batch // len(prompts)
    shape = {"batch": batch, "G": group}
    if plain:
        bench.measure({**shape, "variant": "plain"}, lambda: (bench.plain(prompts, group), None))
    for variant in variants:
        name = variant["variant"]
        chosen = {key: value for key, value in variant.items() if key != "variant"}
        row = {**shape, "variant": name}
        drawn = bench.measure(row, lambda c=chosen: bench.engine(prompts, group, **c))
        if drawn is None:
            continue
        bench.drawn[batch, group, name] = drawn
        exact = bench.drawn.get((batch, group, "bf16"))
        if exact is not None:
            row["other tokens"], row["other steps"] = differing(exact, drawn)
            print(f"  other tokens than in bf16: {row['other tokens']:.4f}, other steps: {row['other steps']:.4f}")
        twin = bench.drawn.get((batch, group, SAME.get(name, "")))
        if twin is not None:
            row["same as replayed"] = differing(twin, drawn) == (0.0, 0.0)
            print("  the same tokens as replayed" if row["same as replayed"] else f"  WRONG: {differing(twin, drawn)}")


def differing(one: list[Any], other: list[Any]) -> tuple[float, float]:
    """Return the shares of tokens, and of steps at which they were unmasked, that differ."""
    pairs = [
        (a != b, first != second)
        for x, y in zip(one, other, strict=True)
        for a, b, first, second in zip(x.token_ids, y.token_ids, x.unmasked_at, y.unmasked_at, strict=False)
    ]
    tokens, steps = zip(*pairs, strict=True)
    return sum(tokens) / len(pairs), sum(steps) / len(pairs)


def table(rows: list[dict[str, Any]]) -> None:
    """Print seconds and speed-ups, exact and with keys and values kept, next to the paper's."""
    nothing = float("nan")
    print("batch G | reuse | plain | bf16 | fp8_tensor | bf16 / fp8 | plain / bf16 | peak GiB bf16, fp8 | Table 6")
    for batch, group in dict.fromkeys((row["batch"], row["G"]) for row in rows):
        here = {row["variant"]: row for row in rows if (row["batch"], row["G"]) == (batch, group)}
        for kind in ("", ", reuse prompt", ", reuse blocks"):
            lines = [here.get(name, {}) for name in ("plain", f"bf16{kind}", f"fp8_tensor{kind}")]
            plain, bf16, fp8 = (line.get("generate", nothing) for line in lines)
            if not (lines[1] or lines[2]):
                continue
            paper, beside = TABLE_6.get((batch, group)), ""
            if paper is not None and not kind:
                beside = f"{paper[0]} / {paper[1]} = {paper[0] / paper[1]:.2f}, {paper[2]}, {paper[3]} GB"
            peaks = ", ".join(f"{line.get('peak_gib', nothing):.1f}" for line in lines[1:])
            cells = [f"{one:.2f}" for one in (plain, bf16, fp8, bf16 / fp8, plain / bf16)]
            print(" | ".join([f"{batch} {group}", kind[8:] or "none", *cells, peaks, beside]))


if __name__ == "__main__":
    main()
