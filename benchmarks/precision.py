"""Speed and memory of the precision plugins on one GPU: prints tables, writes JSON.

    python benchmarks/precision.py stack        # Qwen2.5-7B shape: UnifiedFP8 and QATAligned against bf16
    python benchmarks/precision.py quantizers   # bandwidth of the quantizers against a copy
    python benchmarks/precision.py lora         # Qwen2.5-32B shape: NVFP4LoRA under gradient checkpointing
    python benchmarks/precision.py alignment    # 1.5B shape: mean |log-ratio|, aligned against unaligned

Random weights: speed and memory do not depend on them.
"""

import argparse
import gc
import json
import weakref
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from lit_qrl.formats import FP8Block, Int4Group
from lit_qrl.formats import get as get_format
from lit_qrl.formats.kernels import dispatch
from lit_qrl.functional.logprobs import token_logprobs
from lit_qrl.network.linears import quantizable_linears, swap_linears
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.network.structure import cached
from lit_qrl.precision import NVFP4LoRA, QATAligned, QuantizedPrecision, UnifiedFP8
from lit_qrl.precision.packed_lora import PackedLinear
from lit_qrl.precision.source import unchanged

SHAPES: dict[str, dict[str, int]] = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152064},
}  # fmt: skip
GIB = 2**30
# Kernels that multiply matrices, by a part of their name.
GEMM_NAMES = ("gemm", "nvjet", "cutlass", "xmma", "sm90_", "cublas")


def config(shape: str, layers: int | None) -> Qwen2Config:
    sizes = dict(SHAPES[shape])
    if layers:
        sizes["num_hidden_layers"] = layers
    return Qwen2Config(**sizes, tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False)


def seconds(work: Callable[[], Any], repeats: int = 7, warmup: int = 3) -> float:
    """Median seconds of `work` on the GPU."""
    for _ in range(warmup):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def queued_seconds(work: Callable[[], Any], calls: int = 20) -> float:
    """Seconds of `work` on the GPU when it is one of many in the queue, as in a step: the launches cost nothing."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return seconds(graph.replay) / calls


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


# ----------------------------------------------------------------------------------------------------------- the stack


class Stack:
    """A decoder stack with forward and backward of one micro-batch."""

    def __init__(self, shape: str, layers: int | None, sequences: int, tokens: int) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            self.model: Any = Qwen2Model(config(shape, layers)).train()
            torch.set_default_dtype(torch.float32)
        self.model.embed_tokens = None  # not part of the measurement
        generator = torch.Generator("cuda").manual_seed(1)
        width = self.model.config.hidden_size
        self.inputs = torch.randn(
            sequences, tokens, width, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()

    def forward(self) -> Tensor:
        return self.model(inputs_embeds=self.inputs, use_cache=False).last_hidden_state

    def step(self) -> None:
        self.forward().float().pow(2).mean().backward()

    def step_with_new_weights(self) -> None:
        """One step whose quantized weights are made anew, as after an optimizer step."""
        for part in self.model.modules():
            if hasattr(part, "drop_cache"):
                part.drop_cache()
        self.step()

    def plain_forward(self) -> None:
        with torch.no_grad():
            self.forward()

    def peak(self) -> float:
        """GiB that forward and backward add to weights and gradients."""
        self.step()
        free()
        before = torch.cuda.memory_allocated()
        self.step()
        return (torch.cuda.max_memory_allocated() - before) / GIB


def gemm_share(stack: Stack) -> float:
    """Share of the step's kernel time that linear layers' GEMMs take."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        stack.step()
        torch.cuda.synchronize()
    times = {event.key.lower(): event.self_device_time_total for event in profile.key_averages()}
    return sum(time for name, time in times.items() if is_gemm(name)) / sum(times.values())


def is_gemm(kernel: str) -> bool:
    attention = any(part in kernel for part in ("flash", "fmha", "sdpa"))
    return not attention and any(part in kernel for part in GEMM_NAMES)


def layer_speedup(plugin: QuantizedPrecision, stack: Stack, rows: int) -> float:
    """bf16 over low-bit seconds of forward and backward, over one decoder layer's linear layers alone."""
    block = stack.model.layers[0]
    total = {"plain": 0.0, "low": 0.0}
    for linear in quantizable_linears(block).values():
        plain = nn.Linear(linear.in_features, linear.out_features, bias=False, device="cuda", dtype=torch.bfloat16)
        holder = nn.ModuleList([nn.Linear(1, 1)])
        holder[0] = plain
        x = torch.randn(rows, linear.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(rows, linear.out_features, device="cuda", dtype=torch.bfloat16)
        total["plain"] += seconds(lambda layer=plain, x=x, grad=grad: layer(x).backward(grad))
        plugin.convert_module(holder)
        total["low"] += seconds(lambda layer=holder[0], x=x, grad=grad: layer(x).backward(grad))
    return total["plain"] / total["low"]


def stack_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def measure(name: str, plugin: QuantizedPrecision | None) -> Stack:
        free()
        stack = Stack(args.shape or "7b", args.layers, args.sequences, args.tokens)
        if plugin is not None:
            plugin.convert_module(stack.model)
        row: dict[str, Any] = {"learner": name, "step_ms": seconds(stack.step) * 1e3}
        row["step_new_weights_ms"] = seconds(stack.step_with_new_weights) * 1e3
        row["forward_ms"] = seconds(stack.plain_forward) * 1e3
        row["activations_gib"] = stack.peak()
        rows.append(row)
        return stack

    plain = measure("bf16", None)
    share = gemm_share(plain)
    rows[0]["gemm_share"] = share
    speedups = {}
    for backend in args.backends:
        speedups[backend] = layer_speedup(UnifiedFP8(backend), plain, args.sequences * args.tokens)
    del plain
    for backend in args.backends:
        measure(f"UnifiedFP8({backend})", UnifiedFP8(backend))
        ceiling = 1 / (1 - share + share / speedups[backend])
        rows[-1] |= {"layer_speedup": speedups[backend], "ceiling": ceiling}
    measure("QATAligned(fp8_block)", QATAligned(FP8Block()))
    measure("QATAligned(int4_group)", QATAligned(Int4Group()))
    for row in rows:
        for key in ("step", "step_new_weights", "forward"):
            row[f"{key}_speedup"] = rows[0][f"{key}_ms"] / row[f"{key}_ms"]
        if "ceiling" in row:
            row["of_ceiling"] = row["step_speedup"] / row["ceiling"]
    return rows


# ---------------------------------------------------------------------------------------------------------- quantizers


def quantizer_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    source = torch.empty(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(partial(target.copy_, source)) / 1e12
    del source, target
    rows: list[dict[str, Any]] = [{"quantizer": "copy", "shape": "2^29", "tb_per_s": copy, "of_copy": 1.0}]

    def measure(name: str, x: Tensor, work: Callable[[], Any], written: float) -> None:
        moved = x.numel() * (x.element_size() + written)
        rate = moved / queued_seconds(work) / 1e12
        rows.append({"quantizer": name, "shape": str(tuple(x.shape)), "tb_per_s": rate, "of_copy": rate / copy})

    tokens = args.sequences * args.tokens
    for width in (3584, 18944):
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        measure("1x128 along", x, lambda x=x: dispatch.e4m3_tiles(x, True, False), 1)
        measure("1x128 along and across", x, lambda x=x: dispatch.e4m3_tiles(x, True, True), 2)
        measure("per token", x, lambda x=x: dispatch.e4m3_inputs(x, True), 1)
        weight = torch.randn(width, 3584, device="cuda", dtype=torch.bfloat16)
        measure("128x128 weight", weight, lambda w=weight: dispatch.fp8_weights(w, "fp8_blocks"), 1)
        measure("INT4 weight", weight, lambda w=weight: dispatch.int4_groups(w, 128), 0.5)
        q = Int4Group().quantize(weight)
        measure("INT4 multiplied out", weight, lambda q=q: Int4Group().dequantize(q, torch.bfloat16), 0.5)
        for name in ("nvfp4", "mxfp4", "nf4"):
            layer = PackedLinear(get_format(name), (width, 3584), cache=False).to("cuda")
            layer.set_weight(get_format(name).quantize(weight))
            measure(f"{name} multiplied out", weight, lambda layer=layer: layer.dequantized(torch.bfloat16), 0.5)
    return rows


# ---------------------------------------------------------------------------------------------------------------- LoRA


class Policy:
    """What NVFP4LoRA asks of a policy."""

    def __init__(self, network: Any) -> None:
        from peft import LoraConfig, get_peft_model

        self.lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
        self.model = get_peft_model(network, self.lora)
        self.network = self.model.get_base_model()


def lora_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in args.formats:
        free()
        torch.manual_seed(0)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            network: Any = Qwen2ForCausalLM(config(args.shape or "32b", args.layers)).train()
            torch.set_default_dtype(torch.float32)
        policy = Policy(network)
        plugin = NVFP4LoRA(name)
        plugin.configure_policy(policy)
        free()
        layers = plugin.packed(policy.network)
        packed = sum(t.nbytes for layer in layers.values() for t in (layer.codes, layer.scales) if t is not None)
        adapter = sum(p.nbytes for p in policy.network.parameters() if p.requires_grad)
        base = torch.cuda.memory_allocated() - adapter
        policy.network.gradient_checkpointing_enable({"use_reentrant": False})
        policy.network.enable_input_require_grads()
        tokens = torch.randint(0, 1000, (4, 2304), device="cuda")
        alive = watch_dequantized()

        def step(network: Any = policy.network, tokens: Tensor = tokens) -> None:
            hidden = network.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
            logprobs, _ = token_logprobs(hidden, network.lm_head.weight, tokens[:, 1:])
            logprobs.mean().backward()

        step()
        torch.cuda.reset_peak_memory_stats()
        taken = seconds(step, repeats=3, warmup=1)
        rows.append(
            {
                "format": name,
                "packed_gib": packed / GIB,
                "base_gib": base / GIB,
                "step_peak_gib": torch.cuda.max_memory_allocated() / GIB,
                "step_s": taken,
                "dequantized_alive": alive["most"],
            }
        )
        PackedLinear.dequantized = alive["original"]
        del policy, network, layers, step
    return rows


def watch_dequantized() -> dict[str, Any]:
    """Count how many dequantized weights exist at once."""
    state: dict[str, Any] = {"now": 0, "most": 0, "original": PackedLinear.dequantized}

    def gone() -> None:
        state["now"] -= 1

    def dequantized(self: PackedLinear, dtype: torch.dtype) -> Tensor:
        weight = state["original"](self, dtype)
        state["now"] += 1
        state["most"] = max(state["most"], state["now"])
        weakref.finalize(weight, gone)
        return weight

    PackedLinear.dequantized = dequantized  # pyright: ignore
    return state


# ----------------------------------------------------------------------------------------------------------- alignment


def alignment_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Score the same tokens by prefill (the learner) and one by one with a cache (the sampler), aligned and not."""
    rows = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            network: Any = Qwen2ForCausalLM(config(args.shape or "1.5b", args.layers)).eval()
            torch.set_default_dtype(torch.float32)
        tokens = torch.randint(0, 1000, (16, 128), device="cuda")
        plain = scored(network, tokens)
        rows.append(compared("bf16", seed, plain, decoded(network, tokens)))
        for name in args.formats:
            options = {"activations": "token"} if name == "fp8_tensor" else {}
            plugin = QATAligned(get_format(name, **options))
            learner = deepcopy(network)
            plugin.convert_module(learner)
            sampler = published(plugin, learner, deepcopy(network))
            drawn = decoded(sampler, tokens)
            rows.append(compared(f"{name} unaligned", seed, plain, drawn))
            rows.append(compared(f"{name} aligned", seed, scored(learner, tokens), drawn))
            del learner, sampler
        del network
        free()
    return rows


def published(plugin: QATAligned, learner: Any, sampler: Any) -> Any:
    """Give `sampler` the layers that `plugin` publishes."""
    swap_linears(sampler, lambda _, linear: QuantizedLinear.from_linear(linear, plugin.format))
    policy = SimpleNamespace(network=learner, named_weights=learner.named_parameters)
    source = plugin.source(policy, plugin.format)
    layers = list(source.shapes)
    tensors: dict[str, dict[str, Tensor]] = {layer: {} for layer in layers}
    for name, tensor in source.whole(unchanged, None):
        layer, _, suffix = name.rpartition(".")
        if layer in tensors and suffix != "bias":
            tensors[layer][suffix] = tensor
    for layer in layers:
        sampler.get_submodule(layer).load(tensors[layer])
    return sampler


@torch.no_grad()
def scored(network: Any, tokens: Tensor) -> Tensor:
    hidden = network.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    return token_logprobs(hidden, network.lm_head.weight, tokens[:, 1:])[0]


@torch.no_grad()
def decoded(network: Any, tokens: Tensor) -> Tensor:
    cache, out = DynamicCache(), []
    for t in range(tokens.shape[1] - 1):
        state = network.model(input_ids=tokens[:, t : t + 1], **cached(network, cache))
        out.append(token_logprobs(state.last_hidden_state[:, 0], network.lm_head.weight, tokens[:, t + 1])[0])
    return torch.stack(out, dim=1)


def compared(name: str, seed: int, learner: Tensor, sampler: Tensor) -> dict[str, Any]:
    return {"pair": name, "seed": seed, "mean_abs_log_ratio": float((learner - sampler).abs().mean())}


# ---------------------------------------------------------------------------------------------------------------------

PARTS = {"stack": stack_table, "quantizers": quantizer_table, "lora": lora_table, "alignment": alignment_table}


def show(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [format(row[c], ".3f") if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns]
        for row in rows
    ]
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    for line in [columns, *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--backends", nargs="*", default=["torch", "te"])
    parser.add_argument("--formats", nargs="*", default=None)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("every part needs a GPU, and torch finds none.")
    if args.formats is None:
        args.formats = (
            ["nvfp4"] if args.part == "lora" else ["int4_group", "nvfp4", "fp8_tensor", "fp8_row", "fp8_block"]
        )
    rows = PARTS[args.part](args)
    show(rows)
    record = {
        "part": args.part,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": args.shape,
        "layers": args.layers,
        "rows": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
