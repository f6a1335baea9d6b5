"""Tokens/s of the embedded engine with CUDA graphs and without, beside vLLM and its options, and transformers.

    python benchmarks/embedded.py --shapes 0.5b 1.5b --out out.json

Qwen2.5's shapes in bf16 with random weights; prompts of 200 tokens, of which each has 8 completions of 512 tokens, at
most 64 (`--batch`) at a time. Each line is printed when it is measured, and each process that fails costs its own
lines alone.

graphs    `TransformersEngine(cuda_graphs=True)`: all completions
fp8_row   the same, published in that format; so is fp8_block
uneven    the same in bf16, where one token in 500 ends a completion
launched  `TransformersEngine(cuda_graphs=False)`: 64 completions of 128 tokens, since launches take what they take
generate  `model.generate` of transformers, as TRL calls it without vLLM: the same 64 completions of 128 tokens
vllm      `VLLMEngine`, CUDA graphs without compilation: all completions, in a process of its own for each shape with
          the lines below
peaked    the same of a model whose final norm is so large that it draws nearly greedily and falls into repetitions
long      the same with prompts of 3500 tokens and completions of 256
profile   kernels of the steps of `graphs`, and the share of the time in which the GPU runs any

`|d|` is the mean |log-ratio| of a few completions to the model's own forward pass; random weights amplify last bits
(docs/studies/rollout.md), so lines are compared with each other. `--tiny` tries every line but vLLM's on a CPU.
"""

import argparse
import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker import measured  # beside this script

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 512},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 151936},
}
VLLM: dict[str, dict[str, Any]] = {
    "vllm": {},
    "peaked": {},
    "long": {},
}
"""The lines of vLLM, and arguments of its engine; those with the same follow each other and share one."""
LINES = ("graphs", "fp8_row", "fp8_block", "uneven", "launched", "generate", *VLLM, "profile")
LONG_PROMPT, LONG_COMPLETION = 3500, 256
PEAK = 30.0
SCORED = 8  # completions whose log-probs are compared
SLOW_TOKENS = 128
SHOWN = 14  # kernels of a profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b"])
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded at once, at most")
    parser.add_argument("--completion", type=int, default=512, help="tokens of each completion")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU")
    parser.add_argument("--timeout", type=float, default=80, help="seconds for each process")
    parser.add_argument("--budget", type=float, default=180, help="seconds for all; none starts in the last 15")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--worker", nargs=3, metavar=("SHAPE", "LINES", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.shapes, args.prompts, args.group, args.prompt, args.completion = ["tiny"], 4, 4, 12, 24
        args.lines = [line for line in args.lines if line not in VLLM]
    if args.worker:
        work(args, args.worker[0], args.worker[1].split(","), Path(args.worker[2]))
        return
    end = time.perf_counter() + args.budget
    results: dict[str, dict[str, Any]] = {shape: {} for shape in args.shapes}
    own, others = ([line for line in args.lines if (line in VLLM) == theirs] for theirs in (False, True))
    tasks = [(shape, own) for shape in args.shapes if own]
    tasks += [(shape, [line for line in VLLM if line in others]) for shape in args.shapes if others]
    for shape, lines in tasks:
        left = end - time.perf_counter()
        found = {"error": "no time left"}
        if left > 15:
            found = measured([shape, ",".join(lines)], min(args.timeout, left))
        if "error" in found:
            print(f"{shape} {' '.join(lines)}: {found['error']}", flush=True)
            found["error"] = "; ".join(filter(None, (results[shape].get("error"), found["error"])))
        results[shape] |= found
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1))
    table(results)


def table(results: dict[str, dict[str, Any]]) -> None:
    """Print tokens/s, and their share of vLLM's."""
    print("| shape | line | tokens/s | of vLLM's | seconds | peak, GiB | \\|d\\| |\n| --- " + "| --- " * 6 + "|")
    for shape, found in results.items():
        vllm = found.get("vllm", {}).get("tokens_per_second")
        for line, figures in found.items():
            if line in LINES and "tokens_per_second" in figures:
                speed, apart = figures["tokens_per_second"], figures["distance"]
                share, peak = f"{speed / vllm:.2f}" if vllm else "-", figures.get("peak") or "-"
                print(f"| {shape} | {line} | {speed:.0f} | {share} | {figures['seconds']} | {peak} | {apart} |")


def work(args: argparse.Namespace, shape: str, lines: list[str], file: Path) -> None:
    """Measure some lines of a shape in this process, and write each to the file when it is there."""
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("lit_qrl.rollout.graphs").setLevel(logging.DEBUG)  # says where a step could not be recorded
    figures: dict[str, Any] = {}
    bench = None
    for line in lines:
        try:
            bench = bench or Bench(args, shape)
            figures[line] = bench.run(line)
            print(f"{shape} {line}: {json.dumps(figures[line])}", flush=True)
        except Exception as error:
            traceback.print_exc()
            figures["error"] = f"{line}: {type(error).__name__}: {str(error)[:200]}"
        file.write_text(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind that can keep the interpreter alive


class Bench:
    """One shape: a learner's weights, and the engine of the line that is measured."""

    def __init__(self, args: argparse.Namespace, shape: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config

        self.torch, self.args = torch, args
        self.device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
        config = Qwen2Config(**SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True)
        torch.manual_seed(0)
        with torch.device(self.device):
            self.network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.network.requires_grad_(False).eval()
        self.vocabulary = config.vocab_size
        self.held: tuple[dict[str, Any], Any] | None = None

    def prompts(self, count: int, seed: int, tokens: int | None = None) -> list[list[int]]:
        generator = self.torch.Generator().manual_seed(seed)
        return self.torch.randint(self.vocabulary, (count, tokens or self.args.prompt), generator=generator).tolist()

    def run(self, line: str) -> dict[str, Any]:
        if line == "generate":
            return self.generate()
        if line == "profile":
            return self.profile()
        slow = line == "launched"
        format = line if line.startswith("fp8") else None
        norm = self.network.model.norm.weight
        self.torch.nn.init.constant_(norm, PEAK if line.startswith("peaked") else 1.0)
        engine = self.engine(line, format)
        prompts, group, tokens = self.args.prompts, self.args.group, self.args.completion
        length = self.args.prompt
        if line.startswith("long"):
            length, tokens, group = LONG_PROMPT, LONG_COMPLETION, max(1, self.args.batch // prompts)
        if slow:
            group, tokens = max(1, self.args.batch // prompts), min(tokens, SLOW_TOKENS)
        from lit_qrl.types import SamplingParams

        stops = tuple(range(max(1, self.vocabulary // 500))) if line == "uneven" else ()
        sampling = SamplingParams(max_tokens=tokens, stop_token_ids=stops, ignore_stop=not stops)
        short = SamplingParams(max_tokens=min(tokens, 16), ignore_stop=True)
        engine.generate(self.prompts(prompts, 1, length), group, 1, None, short)  # kernels are made
        seconds, count, drawn, asked = [], 0, [], []
        for seed in (2,) if slow else (2, 3):
            asked = self.prompts(prompts, seed, length)
            self.start()
            begun = time.perf_counter()
            drawn = engine.generate(asked, group, seed, None, sampling)
            self.sync()
            seconds.append(time.perf_counter() - begun)
            count = sum(len(completion.token_ids) for completion in drawn)
        found = {"tokens_per_second": round(count / seconds[-1], 1), "tokens": count, "seconds": round(seconds[-1], 3)}
        found |= {"first": round(seconds[0], 3), "peak": self.peak()}
        trust = getattr(engine, "trust", None)
        if trust is not None and line != "launched":
            found |= {"recorded": trust.former is not None, "broken": trust.broken}
        if line not in VLLM:
            engine.close()
        return found | {"distance": self.distance(asked, group, drawn)}

    def distance(self, prompts: list[list[int]], group: int, drawn: list[Any]) -> float:
        """Return mean |log-ratio| of the first completions, scored by the model's own forward pass."""
        apart = []
        for row in range(0, len(drawn), max(1, len(drawn) // SCORED)):
            prompt, one = prompts[row // group], drawn[row]
            ids = self.torch.tensor([[*prompt, *one.token_ids]], device=self.device)
            with self.torch.no_grad():
                logits = self.network(input_ids=ids, logits_to_keep=len(one.token_ids) + 1).logits[0, :-1]
            scores = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            apart.append((scores - self.torch.tensor(one.logprobs, device=self.device)).abs())
        return round(self.torch.cat(apart).mean().item(), 5)

    def engine(self, line: str, format_name: str | None) -> Any:
        """Return an engine with the weights published."""
        from lit_qrl import formats
        from lit_qrl.network.adapters import merged_weights
        from lit_qrl.network.linears import quantizable_linears
        from lit_qrl.network.stream import weight_stream
        from lit_qrl.rollout import TransformersEngine
        from lit_qrl.rollout.engine import SamplerSpec
        from lit_qrl.types import SamplingParams

        if line in VLLM:
            return self.vllm(VLLM[line])
        engine = TransformersEngine(max_batch=self.args.batch, cuda_graphs=line != "launched")
        sampling = SamplingParams(max_tokens=self.args.completion, ignore_stop=True)
        format = None if format_name is None else formats.get(format_name)
        spec = SamplerSpec(sampling=sampling, format=format, prompt_limit=self.args.prompt)
        engine.validate(spec)
        engine.setup(spec, SimpleNamespace(network=self.network, lora=None))
        layers = [] if format is None else list(quantizable_linears(self.network))
        weights = weight_stream(merged_weights(self.network), format, layers)
        engine.load_weights(engine.arranged(weights), format, 0)
        return engine

    def vllm(self, options: dict[str, Any]) -> Any:
        """Return a vLLM engine with the weights published, the one of the line before where it has the same options."""
        from lit_qrl.network.adapters import merged_weights
        from lit_qrl.network.stream import weight_stream
        from lit_qrl.rollout.engine import SamplerSpec
        from lit_qrl.rollout.vllm.engine import VLLMEngine
        from lit_qrl.types import SamplingParams

        if self.held is None or self.held[0] != options:
            if self.held is not None:
                self.held[1].close()
            begun = time.perf_counter()
            engine = VLLMEngine(gpu_memory_utilization=0.4, max_num_seqs=self.args.batch, quick_start=True, **options)
            longest = max(self.args.completion, LONG_COMPLETION)
            spec = SamplerSpec(sampling=SamplingParams(max_tokens=longest, ignore_stop=True), prompt_limit=LONG_PROMPT)
            engine.validate(spec)
            engine.setup(spec, SimpleNamespace(network=self.network, lora=None))
            self.held = options, engine
            engine.load_weights(engine.arranged(weight_stream(merged_weights(self.network), None, [])), None, 0)
            print(f"started in {time.perf_counter() - begun:.1f} s: {options}", flush=True)
        engine = self.held[1]
        engine.load_weights(engine.arranged(weight_stream(merged_weights(self.network), None, [])), None, 1)
        return engine

    def generate(self) -> dict[str, Any]:
        rows, tokens = self.args.batch if self.device == "cuda" else 16, min(self.args.completion, SLOW_TOKENS)
        prompts = self.prompts(self.args.prompts, 2)
        ids = self.torch.tensor([prompts[row % len(prompts)] for row in range(rows)], device=self.device)
        options = {"attention_mask": self.torch.ones_like(ids), "do_sample": True, "top_k": 0, "top_p": 1.0}
        options |= {"pad_token_id": 0, "eos_token_id": None}
        self.network.generate(ids, max_new_tokens=8, **options)
        self.start()
        begun = time.perf_counter()
        out = self.network.generate(ids, max_new_tokens=tokens, **options)
        self.sync()
        seconds, count = time.perf_counter() - begun, rows * (out.shape[1] - ids.shape[1])
        figures = {"tokens_per_second": round(count / seconds, 1), "tokens": count, "seconds": round(seconds, 3)}
        return figures | {"peak": self.peak()}

    def profile(self) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        from lit_qrl.types import SamplingParams

        engine = self.engine("graphs", None)
        steps = min(self.args.completion, 64)
        sampling = SamplingParams(max_tokens=steps, ignore_stop=True)
        group = max(1, self.args.batch // self.args.prompts)
        engine.generate(self.prompts(self.args.prompts, 1), group, 1, None, sampling)
        kinds = [ProfilerActivity.CUDA] if self.device == "cuda" else [ProfilerActivity.CPU]
        self.sync()
        begun = time.perf_counter()
        with profile(activities=kinds) as found:
            engine.generate(self.prompts(self.args.prompts, 2), group, 2, None, sampling)
            self.sync()
            seconds = time.perf_counter() - begun
        name = "self_device_time_total" if self.device == "cuda" else "self_cpu_time_total"
        events = sorted(found.key_averages(), key=lambda event: -getattr(event, name))
        busy = sum(getattr(event, name) for event in events) / 1e6
        print(f"profile of {steps} tokens of {group * self.args.prompts} completions, prefill among them: "
              f"{seconds * 1e3:.0f} ms, kernels {busy * 1e3:.0f} ms")  # fmt: skip
        rows = [(getattr(event, name) / 1e3, event.count, event.key[:110]) for event in events[:SHOWN]]
        for spent, count, kernel in rows:
            print(f"  {spent:8.2f} ms {count:6d} x {kernel}", flush=True)
        engine.close()
        return {"seconds": round(seconds, 4), "busy": round(busy, 4), "kernels": rows}

    def start(self) -> None:
        self.sync()
        if self.device == "cuda":
            self.torch.cuda.reset_peak_memory_stats()

    def sync(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def peak(self) -> float | None:
        """Return the most GiB that torch held in this process."""
        return round(self.torch.cuda.max_memory_allocated() / 2**30, 2) if self.device == "cuda" else None


if __name__ == "__main__":
    main()
