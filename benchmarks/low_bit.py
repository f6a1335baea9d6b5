"""Kernels of the precision plugins, one by one, on one GPU: prints tables, writes JSON.

    python benchmarks/low_bit.py sums       # how many digits an FP8 tensor core keeps of a sum
    python benchmarks/low_bit.py variants   # TB/s of each way to lay out the quantizers' work
    python benchmarks/low_bit.py fused      # 7B shape: quantization fused with the norm and the activation before it
    python benchmarks/low_bit.py sampler    # vLLM draws; the learner scores with vLLM's kernel and multiplied out
    python benchmarks/low_bit.py fp16       # short runs on a toy task: FP16 on both sides against bf16 on both

Weights are random. A part that fails leaves the others' figures; `--tiny` shrinks the shapes, for a check anywhere.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from precision import GIB, SHAPES, Stack, free, queued_seconds, seconds, show  # noqa: E402

from lit_qrl import formats  # noqa: E402
from lit_qrl.precision import QATAligned, UnifiedFP8  # noqa: E402

Rows = list[dict[str, Any]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def recorded(rows: Rows, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Append a row with what the block puts into it, and the error that ended it, so that the others go on."""
    try:
        yield row
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:120]
        traceback.print_exc()
    rows.append(row)
    print(row, flush=True)


# ---------------------------------------------------------------------------------------------------------------- sums


def sums(args: argparse.Namespace) -> Rows:
    """Find the smallest term that a sum keeps beside a large one, by the distance of their places along k."""
    from torch.nn import functional as F

    rows: Rows = []
    k = 512

    def total(large: tuple[int, float], small: tuple[int, float], fast: bool) -> float:
        a = torch.zeros(16, k, device=DEVICE)
        b = torch.zeros(16, k, device=DEVICE)
        for place, value in (large, small):
            # split between both operands, since one E4M3 number reaches from 2^-9 to 448 only
            half = 2.0 ** round(torch.tensor(abs(value)).log2().item() / 2)
            a[:, place], b[:, place] = half, value / half
        one = torch.ones((), device=DEVICE)
        kind = F.ScalingType.TensorWise
        eight = torch.float8_e4m3fn
        out = F.scaled_mm(
            a.to(eight), b.to(eight).t(), one, kind, one, kind, output_dtype=torch.float32, use_fast_accum=fast
        )
        return float(out[0, 0])

    for fast in (False, True):
        for place in (1, 15, 31, 32, 64, 127, 128, 256, 500):
            row: dict[str, Any] = {"fast": fast, "distance": place}
            for name, large, sign in (("below", 0, 1.0), ("negative", 0, -1.0), ("before", place, 1.0)):
                other = place if large == 0 else 0
                kept = 0
                for digits in range(6, 25):
                    small = sign * 2.0 ** (8 - digits)
                    if total((large, 256.0), (other, small), fast) != 256.0 + small:
                        break
                    kept = digits
                row[f"digits_{name}"] = kept
            # a negative term that is cut off: towards zero it vanishes, downwards it leaves one unit
            cut = -(2.0**-12)
            row["cut_negative"] = total((0, 256.0), (place, cut), fast) - 256.0
            row["cut_positive"] = total((0, 256.0), (place, -cut), fast) - 256.0
            rows.append(row)
    torch.manual_seed(0)
    for k_size in (1024, 3584, 18944):
        x = torch.randn(256, k_size, device=DEVICE).to(torch.float8_e4m3fn)
        w = torch.randn(512, k_size, device=DEVICE).to(torch.float8_e4m3fn)
        exact = x.double() @ w.double().t()
        one = torch.ones((), device=DEVICE)
        kind = F.ScalingType.TensorWise
        for fast in (False, True):
            out = F.scaled_mm(x, w.t(), one, kind, one, kind, output_dtype=torch.float32, use_fast_accum=fast)
            error = out.double() - exact
            rows.append(
                {
                    "fast": fast,
                    "k": k_size,
                    "relative_norm": float(error.norm() / exact.norm()),
                    "bias": float(error.mean() / exact.std()),
                    "largest": float(error.abs().max() / exact.std()),
                }
            )
    return rows


# ------------------------------------------------------------------------------------------------------------ variants


def variants(args: argparse.Namespace) -> Rows:
    from lit_qrl.formats import nf4
    from lit_qrl.formats.kernels import norm_triton, tiles_triton, values_triton

    def copy_rate(size: int) -> float:
        source = torch.empty(size, device=DEVICE, dtype=torch.uint8)
        target = torch.empty_like(source)
        return 2 * size / queued_seconds(partial(target.copy_, source), 10) / 1e12

    # the first of a process can run at two thirds of its speed
    copy = max(copy_rate(2**15 if args.tiny else 2**30) for _ in range(3))
    rows: Rows = [{"kernel": "copy", "tb_per_s": copy, "of_copy": 1.0}]

    def measure(kernel: str, variant: str, x: Tensor, work: Any, bytes_per_element: float) -> None:
        row: dict[str, Any] = {"kernel": kernel, "variant": variant, "shape": str(tuple(x.shape))}
        try:
            rate = x.numel() * bytes_per_element / queued_seconds(work, 10) / 1e12
            row |= {"tb_per_s": rate, "of_copy": rate / copy}
        except Exception as error:
            row["error"] = str(error)[:80]
        rows.append(row)
        print(row, flush=True)

    tiles, norm, gated = tiles_triton.tiles, tiles_triton.NORM, tiles_triton.GATED
    for shape in [(256, 256)] if args.tiny else [(8192, 18944), (8192, 3584)]:
        x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        other = torch.randn_like(x)
        rstd, gain = torch.rand(shape[0], device=DEVICE), torch.rand(shape[1], device=DEVICE, dtype=torch.bfloat16)
        # a small tensor is not copied at the rate of a large one either
        same = x.numel() * 4 // 2
        rate = copy_rate(same)
        rows.append({"kernel": "copy", "variant": "as many bytes as both", "shape": str(shape), "tb_per_s": rate})
        rows[-1]["of_copy"] = rate / copy
        for warps, registers in ((8, 80), (8, 128), (16, 64)):
            name = f"{warps} warps, {registers} registers"
            how = partial(tiles, x, warps=warps, registers=registers)
            measure("tiles both", name, x, partial(how, rows=True, columns=True), 4)
            measure("tiles across", name, x, partial(how, rows=False, columns=True), 3)
            measure("tiles along", name, x, partial(how, rows=True, columns=False), 3)
            normed = partial(how, rows=True, before=norm, rstd=rstd, weight=gain)
            measure("norm + both", name, x, partial(normed, columns=True), 6)
            measure("norm + along", name, x, partial(normed, columns=False), 5)
            multiplied = partial(how, rows=True, before=gated, other=other)
            measure("SiLU·mul + both", name, x, partial(multiplied, columns=True), 8)
            measure("SiLU·mul + along", name, x, partial(multiplied, columns=False), 7)
        measure(
            "tiles both", "two launches", x, lambda x=x: (tiles(x, True, False), tiles(x, False, True)), 4
        )  # fmt: skip
        measure("norm", "", x, partial(norm_triton.norm, x, gain, 1e-6), 4)
        measure("sum + norm", "", x, partial(norm_triton.norm, x, gain, 1e-6, other), 8)
        for programs in (264, 528, 1056):
            for warps in (4, 8, 16):
                work = partial(norm_triton.norm_backward, x, other, rstd, gain, None, programs, warps)
                measure("norm backward", f"{programs} programs, {warps} warps", x, work, 6)
        measure("gated backward", "", x, partial(tiles_triton.gated_backward, torch.randn_like(x), x, other), 10)
        del x, other
        weight = torch.randn(shape[1], min(shape[0], 3584), device=DEVICE, dtype=torch.bfloat16)
        for tile in (2048, 4096, 8192):
            for warps in (4, 8):
                work = partial(values_triton.int4_groups, weight, 128, tile, warps)
                measure("INT4 weight", f"tile {tile}, {warps} warps", weight, work, 2.5)
        for name, kind in (("int4_group", 0), ("nvfp4", 1), ("mxfp4", 1), ("nf4", 2)):
            q = formats.get(name).quantize(weight)
            per = {"int4_group": 128, "nvfp4": 16, "mxfp4": 32, "nf4": 64}[name]
            table = nf4._table(weight.device) if name == "nf4" else None
            for words, warps in ((512, 4), (2048, 4)):
                work = partial(
                    values_triton.values, q.codes, q.scales, per, kind, q.shape, torch.bfloat16,
                    None if q.global_scale is None else q.global_scale, table, words, warps,
                )  # fmt: skip
                measure(f"{name} multiplied out", f"{words} words, {warps} warps", weight, work, 2.5)
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows[1:]:
        key = (row["kernel"], row["shape"])
        if "tb_per_s" in row and row["tb_per_s"] > best.get(key, {"tb_per_s": 0})["tb_per_s"]:
            best[key] = row
    args.summary = [rows[0], *best.values(), *(row for row in rows if "error" in row)]
    return rows


# --------------------------------------------------------------------------------------------------------------- fused


def fused_steps(args: argparse.Namespace) -> Rows:
    rows: Rows = []
    plugins = {
        "bf16": lambda: None,
        "UnifiedFP8(torch)": lambda: UnifiedFP8("torch", fuse=False),
        "UnifiedFP8(torch, fuse)": lambda: UnifiedFP8("torch", fuse=True),
        "QATAligned(fp8_block)": lambda: QATAligned("fp8_block", fuse=False),
        "QATAligned(fp8_block, fuse)": lambda: QATAligned("fp8_block", fuse=True),
        "UnifiedFP8(te)": lambda: UnifiedFP8("te"),
    }
    for name, make in plugins.items():
        if args.learners and name not in args.learners:
            continue
        free()
        with recorded(rows, {"learner": name}) as row:
            stack = Stack("7b", args.layers, 4, 2048)
            plugin = make()
            if plugin is not None:
                plugin.convert_module(stack.model)
            row["step_ms"] = seconds(stack.step, 5, 2) * 1e3
            row["new_weights_ms"] = seconds(stack.step_with_new_weights, 3, 1) * 1e3
            row["forward_ms"] = seconds(stack.plain_forward, 5, 2) * 1e3
            row["activations_gib"] = stack.peak()
            if rows and "step_ms" in rows[0]:
                row["step_speedup"] = rows[0]["step_ms"] / row["step_ms"]
                row["forward_speedup"] = rows[0]["forward_ms"] / row["forward_ms"]
            del stack
    return rows


# ------------------------------------------------------------------------------------------------------------- sampler


def sampler(args: argparse.Namespace) -> Rows:
    """Mean |log-ratio| of the learner to what vLLM reported for its own tokens, by the learner's kernel."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from lit_qrl.functional.logprobs import token_logprobs
    from lit_qrl.precision.source import unchanged
    from lit_qrl.rollout.engine import SamplerSpec
    from lit_qrl.rollout.vllm.engine import VLLMEngine
    from lit_qrl.types import SamplingParams

    sizes: dict[str, Any] = dict(SHAPES["1.5b"], vocab_size=8192)
    if args.tiny:
        sizes |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"num_key_value_heads": 1, "vocab_size": 512}
    length, count = (16, 4) if args.tiny else (128, 32)
    rows: Rows = []
    torch.manual_seed(0)
    settings = Qwen2Config(**sizes, tie_word_embeddings=False, max_position_embeddings=512)
    with torch.device(DEVICE):
        network: Any = Qwen2ForCausalLM(settings).to(torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, sizes["vocab_size"], (count, length), generator=generator).tolist()
    chosen = args.formats or ["bf16", "int4_group", "nvfp4"]
    kernels = {"bf16": [None], "int4_group": ["dequantize"], "nvfp4": ["dequantize"], "w4a8": ["dequantize", "auto"]}
    for name in chosen:
        engine: Any = None
        try:
            low = {"bf16": None, "w4a8": formats.get("int4_group", activations="fp8")}
            format = low[name] if name in low else formats.get(name)
            options: dict[str, Any] = {"gpu_memory_utilization": 0.3, "enforce_eager": True} if DEVICE == "cuda" else {}
            engine = VLLMEngine(max_num_seqs=32, **options)
            sampling = SamplingParams(max_tokens=length, ignore_stop=True)
            spec = SamplerSpec(sampling=sampling, format=format, prompt_limit=length)
            engine.validate(spec)
            engine.setup(spec, SimpleNamespace(network=network))
            plugin = QATAligned(format) if format is not None else None
            stream = [(key, tensor.detach()) for key, tensor in network.named_parameters()]
            if plugin is not None:
                learner = deepcopy(network)
                plugin.convert_module(learner)
                policy = SimpleNamespace(network=learner, named_weights=learner.named_parameters)
                stream = list(plugin.source(policy, format).whole(unchanged, torch.bfloat16))
            engine.load_weights(iter(stream), format, 0)
            drawn = engine.generate(prompts, 1, seed=0)
            tokens = torch.tensor([p + list(c.token_ids) for p, c in zip(prompts, drawn, strict=True)], device=DEVICE)
            reported = torch.tensor([c.logprobs for c in drawn])

            def scored(model: Any, tokens: Tensor = tokens) -> Tensor:
                with torch.no_grad():
                    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, length - 1 : -1]
                    return token_logprobs(hidden, model.lm_head.weight, tokens[:, length:])[0].cpu()

            def compare(kernel: str, model: Any, reported: Tensor = reported, name: str = name) -> None:
                ratio = (scored(model) - reported).abs()
                row = {"format": name, "kernel": kernel, "mean_abs_log_ratio": float(ratio.mean())}
                row["p99"], row["entropy"] = float(ratio.flatten().quantile(0.99)), float(-reported.mean())
                if DEVICE == "cuda":
                    row["score_ms"] = seconds(partial(scored, model), 5, 2) * 1e3
                rows.append(row)
                print(row, flush=True)

            # the sampler against itself: what is left of the mismatch when the learner is the sampler
            sequences = [tuple(row) for row in tokens.tolist()]
            prefill = torch.stack([values[-length:].cpu() for values in engine.score(sequences)])
            itself = (prefill - reported).abs()
            rows.append({"format": name, "kernel": "vLLM's own prefill", "mean_abs_log_ratio": float(itself.mean())})
            rows[-1]["p99"] = float(itself.flatten().quantile(0.99))
            print(rows[-1], flush=True)
            compare("bf16 learner", network)
            for kernel in kernels[name]:
                if kernel is None or format is None:
                    continue
                try:
                    aligned = QATAligned(format, kernel=kernel)
                    learner = deepcopy(network)
                    aligned.convert_module(learner)
                    aligned.choice.sampler = "vllm"
                    compare(kernel, learner)
                    del learner
                except Exception as error:
                    rows.append({"format": name, "kernel": kernel, "error": f"{type(error).__name__}: {error}"[:120]})
                    traceback.print_exc()
        except Exception as error:
            rows.append({"format": name, "error": f"{type(error).__name__}: {error}"[:120]})
            traceback.print_exc()
        finally:
            if engine is not None:
                engine.close()
            if DEVICE == "cuda":
                free()
    return rows + (step_times(args) if DEVICE == "cuda" else [])


def step_times(args: argparse.Namespace) -> Rows:
    """Seconds of the 7B step with packed weights multiplied by vLLM's kernels, four layers of it."""
    rows: Rows = []
    for name, format, kernel in (
        ("bf16", None, None),
        ("int4_group", "int4_group", "dequantize"),
        ("nvfp4", "nvfp4", "dequantize"),
    ):
        free()
        with recorded(rows, {"format": f"{name}, 7B layers", "kernel": kernel}) as row:
            stack = Stack("7b", args.layers or 4, 4, 2048)
            if format is not None:
                QATAligned(format, kernel=kernel).convert_module(stack.model)  # pyright: ignore[reportArgumentType]
            row |= {"step_ms": seconds(stack.step, 5, 2) * 1e3, "forward_ms": seconds(stack.plain_forward, 5, 2) * 1e3}
            row["new_weights_ms"] = seconds(stack.step_with_new_weights, 3, 1) * 1e3
            row["held_gib"] = torch.cuda.memory_allocated() / GIB
            del stack
    return rows


# ---------------------------------------------------------------------------------------------------------------- fp16


def fp16(args: argparse.Namespace) -> Rows:
    """Short runs at one learning rate: mismatch, skipped steps of the loss scaler, non-finite gradients, reward."""
    from lightning.pytorch.callbacks import Callback

    from lit_qrl.callbacks import AIS
    from tests.tiny_run import fit

    class Watch(Callback):
        def __init__(self, eps: float) -> None:
            self.eps = eps
            self.seen: dict[str, list[float]] = {}
            self.steps = self.bad = self.overflows = 0
            self.scales: list[float] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["eps"] = self.eps

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.steps += 1
            self.bad += not all(bool(torch.isfinite(grad).all()) for grad in grads)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                self.scales.append(float(scaler.get_scale()))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            for key, value in trainer.callback_metrics.items():
                if key in ("mismatch/abs_log_ratio", "mismatch/ratio_max", "reward/mean", "loss"):
                    self.seen.setdefault(key, []).append(float(value))

    rows: Rows = []
    iterations = 2 if args.tiny else 30
    # Precision of the learner, format of the sampler, AdamW's epsilon: its default is zero in FP16, and a weight whose
    # gradient was always zero is then divided by zero.
    settings = {
        "fp32 / fp32": ("32-true", "fp32", 1e-8),
        "bf16-true / bf16": ("bf16-true", "bf16", 1e-8),
        "bf16-mixed / bf16": ("bf16-mixed", "bf16", 1e-8),
        "16-mixed / fp16": ("16-mixed", "fp16", 1e-8),
        "16-true / fp16": ("16-true", "fp16", 1e-8),
        "16-true, eps 1e-4 / fp16": ("16-true", "fp16", 1e-4),
        "16-true scaled, eps 1e-4 / fp16": ("16-true scaled", "fp16", 1e-4),
    }
    for name, (precision, format, eps) in settings.items():
        if DEVICE == "cpu" and precision == "16-mixed":
            continue  # Lightning has no loss scaler on a CPU
        watch = Watch(eps)
        row: dict[str, Any] = {"learner / sampler": name}
        start = time.perf_counter()
        try:
            options: dict[str, Any] = {"accelerator": "gpu" if DEVICE == "cuda" else "cpu", "max_epochs": iterations}
            if precision == "16-true scaled":
                options["plugins"] = [scaled_half()]
            else:
                options["precision"] = precision
            with tempfile.TemporaryDirectory() as folder:
                fit(Path(folder), callbacks=[AIS(), watch], format=format, trainer=options, guard={"patience": 10**6})
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:160]
            traceback.print_exc()
        last = max(iterations // 3, 1)
        for key, values in watch.seen.items():
            row[key] = sum(values[-last:]) / len(values[-last:])
        row |= {"steps": watch.steps, "non_finite_gradients": watch.bad}
        if watch.scales:
            drops = sum(b < a for a, b in zip(watch.scales, watch.scales[1:], strict=False))
            row |= {"scale_drops": drops, "last_scale": watch.scales[-1]}
        row["seconds"] = time.perf_counter() - start
        rows.append(row)
        print(row, flush=True)
    return rows


def scaled_half() -> Any:
    """FP16 master weights under a dynamic loss scale, which Lightning itself does not offer (QaRL, §3.1)."""
    from lightning.pytorch.plugins.precision import HalfPrecision

    class Scaled(HalfPrecision):
        """Multiplies the loss by a scale that halves at each overflow and doubles after 200 steps without one."""

        def __init__(self) -> None:
            super().__init__("16-true")
            self.factor, self.calm, self.finite = 2.0**16, 0, True
            self.scaler = SimpleNamespace(get_scale=lambda: self.factor)

        def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
            return super().pre_backward(tensor, module) * self.factor

        def _after_closure(self, model: Any, optimizer: Any) -> None:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
            for grad in grads:
                grad.div_(self.factor) if self.finite else grad.zero_()
            self.calm = self.calm + 1 if self.finite else 0
            if not self.finite:
                self.factor /= 2
            elif self.calm >= 200:
                self.factor, self.calm = self.factor * 2, 0
            super()._after_closure(model, optimizer)

    return Scaled()


# ---------------------------------------------------------------------------------------------------------------------

PARTS = {"sums": sums, "variants": variants, "fused": fused_steps, "sampler": sampler, "fp16": fp16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--layers", type=int, help="fewer layers than the 7B shape has")
    parser.add_argument("--learners", nargs="*", help="of the part fused: the names that its table prints")
    parser.add_argument("--formats", nargs="*", help="of the part sampler: bf16, int4_group, nvfp4, w4a8")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    record: dict[str, Any] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    record["device"] = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    tables: dict[str, Rows] = {}
    for part in args.parts:
        args.summary = None
        try:
            record[part] = PARTS[part](args)
            tables[part] = args.summary or record[part]
        except Exception:
            traceback.print_exc()
            record[part] = [{"error": traceback.format_exc(limit=3)[-300:]}]
            tables[part] = [{"error": record[part][0]["error"].splitlines()[-1]}]
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1))
    for part, rows in tables.items():
        print(f"\n== {part}", flush=True)
        show(rows)


if __name__ == "__main__":
    main()
