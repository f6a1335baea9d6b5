"""Speed and memory of the vLLM engine by number format, and what publishing, verifying and sleeping cost.

    python benchmarks/rollout.py --shape 7b --formats bf16 fp8_row int4_group --sections speed publish --out out.json

Weights are random and made on the device; nothing is read or downloaded. Each format has a process of its own, so that
one that fails or hangs costs its own time alone. Sections:

verify   three publishes with every check on: ledgers, columns through the GEMM, read-back, probe (tiny shape only)
speed    tokens/s at each batch size, against `LLM.generate` on the same object with the same log-prob settings
grpo     the same for 64 prompts × 8 completions of uneven length, up to 1024 tokens
publish  seconds of the first publish and of later ones, quantization and receipts included, and of the parts
lora     seconds to replace a LoRA adapter of rank 32 over that base, and tokens/s with it
norms    seconds to replace the norms in place
sleep    seconds to sleep and to wake at levels 1 and 2, with the publish that level 2 needs
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "vocab_size": 2048, "initializer_range": 0.05},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
}
SECTIONS = ("verify", "speed", "grpo", "publish", "lora", "norms", "sleep")
LORA_RANK = 32
# About as many of a 152 k vocabulary that a random model's completion ends after 750 tokens on average.
STOP_TOKENS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="Qwen2.5's shapes, or four small layers")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_row", "fp8_block", "int4_group", "nvfp4"])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=["speed", "publish"])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens of each completion")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each kind; the best counts")
    parser.add_argument("--share", type=float, default=0.45, help="of the GPU's memory, for the engine")
    parser.add_argument("--start", choices=("quick", "compile", "eager"), default="quick", help="how decoding is run")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--no-request-seeds", action="store_true", help="seed the engine instead of each request")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for each format")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--worker", nargs=2, metavar=("FORMAT", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args, *args.worker)
        return
    results = {name: measure(args, name) for name in args.formats}
    if args.out:
        args.out.write_text(
            json.dumps({"arguments": vars(args) | {"out": str(args.out)}, "results": results}, indent=1)
        )
    table(args, results)


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return what a process of its own finds for one format."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", name, str(file)]
        start = time.perf_counter()
        process = subprocess.Popen(command, start_new_session=True)
        problem = ""
        try:
            process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            problem = f"stopped after {args.timeout:g} s"
        figures = json.loads(file.read_text()) if file.exists() else {}
        if process.returncode and not problem and "error" not in figures:
            problem = f"exit status {process.returncode}"
        if problem:
            figures["error"] = problem
        figures["process_seconds"] = round(time.perf_counter() - start, 1)
        print(f"--- {name}: {json.dumps(figures)}", flush=True)
        return figures


def work(args: argparse.Namespace, name: str, file: str) -> None:
    figures: dict[str, Any] = {}
    try:
        bench = Bench(args, name)
        for section in args.sections:
            print(f"--- {name}: {section}", flush=True)
            figures.update(getattr(bench, f"run_{section}")())
            Path(file).write_text(json.dumps(figures))
        bench.close()
    except Exception as error:
        traceback.print_exc()
        figures["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    Path(file).write_text(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind that can keep the interpreter alive


class Bench:
    """One format: a learner's weights on the device, and an engine that is built when a section first needs it."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

        from lit_qrl.precision import formats
        from lit_qrl.precision.surgery import quantizable_linears

        self.torch, self.args, self.name = torch, args, name
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.format = None if name == "bf16" else formats.get(name)
        kind = Qwen3Config if args.shape == "tiny" else Qwen2Config
        limit = args.prompt + max(args.completion, 1024) + 8
        config = kind(**SHAPES[args.shape], max_position_embeddings=max(4096, limit), tie_word_embeddings=False)
        torch.manual_seed(0)
        with torch.device(self.device if args.shape == "tiny" else "meta"):
            self.network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.network.requires_grad_(False).eval()
        self.shapes = {name: tuple(m.weight.shape) for name, m in quantizable_linears(self.network).items()}
        self.vocabulary = config.vocab_size
        self.kept: dict[str, Any] = {}
        self.engine: Any = None
        self.version = -1
        self.previous: Any = None

    # ------------------------------------------------------------------------------------------------------- weights

    def weights(self, keep: bool = False):
        """Yield the learner's weights; random ones are made on the way, and kept for later publishes on demand."""
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(self.version + 1)
        for name, parameter in self.network.named_parameters():
            if parameter.device.type != "meta":
                yield name, parameter.detach()
            elif name in self.kept:
                yield name, self.kept[name]
            else:
                options = {"device": self.device, "dtype": torch.bfloat16}
                if "norm" in name:
                    tensor = torch.ones(parameter.shape, **options)
                else:
                    tensor = torch.empty(parameter.shape, **options).normal_(std=0.02, generator=generator)
                if keep:
                    self.kept[name] = tensor
                yield name, tensor

    def step(self) -> None:
        """Move the learner by about one optimizer step."""
        tensors = self.kept.values() if self.kept else (p for p in self.network.parameters() if not p.is_meta)
        for tensor in tensors:
            tensor.mul_(1.0 + 2**-7 * (self.torch.rand((), device=tensor.device) < 0.5))

    def publish(self, keep: bool = False) -> dict[str, float]:
        """Publish as the trainer does, and return seconds in all and of the verification."""
        from lit_qrl.precision.export import export_tensors
        from lit_qrl.rollout import receipt

        self.version += 1
        self.sync()
        start = time.perf_counter()
        sampled = {name: self.shapes[name] for name in receipt.choose(list(self.shapes), self.version)}
        sent = receipt.SentLedger(self.version, self.format, sampled)
        stream = sent.watch(export_tensors(self.weights(keep), self.format, list(self.shapes)))
        report = self.engine.load_weights(stream, self.format, self.version)
        loaded = time.perf_counter()
        faults = receipt.compare(sent, report.received, self.previous)
        faults += receipt.compare_columns(sent, self.engine.read_columns, exact=self.format is None)
        names = list(sent.receipts())
        faults += receipt.compare_read_back(sent, self.engine.read_back, names[:: max(len(names) // 4, 1)])
        self.sync()
        done = time.perf_counter()
        self.previous, self.report, self.sent = sent.receipts(), report, sent
        for fault in faults[:5]:
            print("FAULT", fault, flush=True)
        return {"all": done - start, "load": loaded - start, "compare": done - loaded, "faults": len(faults)}

    # --------------------------------------------------------------------------------------------------------- engine

    def start(self, **changes: Any) -> float:
        """Build an engine and fill it; return the seconds until then."""
        from lit_qrl.rollout.vllm import VLLMEngine
        from lit_qrl.types import SamplingParams

        self.close()
        args = self.args
        options = {
            "gpu_memory_utilization": args.share,
            "max_num_seqs": 512,
            "enforce_eager": args.start == "eager",
            "quick_start": args.start == "quick",
            "request_seeds": not args.no_request_seeds,
            "engine_args": args.engine_args,
        } | changes
        start = time.perf_counter()
        self.engine = VLLMEngine(**options)
        self.engine.prompt_limit = args.prompt
        sampling = SamplingParams(max_tokens=max(args.completion, 1024), ignore_stop=True)
        self.engine.validate(self.format, sampling)
        self.engine.setup(SimpleNamespace(network=self.network, lora=self.lora_config()), None, sampling)
        first = self.publish(keep="publish" in args.sections or "sleep" in args.sections)
        self.first = first
        return time.perf_counter() - start

    def ready(self) -> dict[str, Any]:
        if self.engine is not None:
            return {}
        seconds = self.start()
        return {
            "start_seconds": round(seconds, 1),
            "weights_gib": round(self.engine.weight_bytes() / 2**30, 3),
            "loaded": self.report.layers.get(next(n for n in self.report.layers if "down_proj" in n)),
        }

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def sync(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def lora_config(self) -> Any:
        from peft import LoraConfig

        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        return LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=layers)

    # ------------------------------------------------------------------------------------------------------- sections

    def run_verify(self) -> dict[str, Any]:
        from lit_qrl.rollout.probe import Probe, learner_scores

        figures = self.ready()
        activations = self.format is not None and self.format.quantizes_activations
        probe = Probe(self.vocabulary, activations)
        faults, probes = [self.first["faults"]], []
        for _ in range(3):
            if self.args.shape == "tiny":
                scores = learner_scores(self.network, probe.tokens, self.format)
                result = probe.compare(self.engine.score(probe.tokens), scores)
                probes.append(round(result.mean, 4))
                faults[-1] += not result.passed
            self.prompts_run(8, 32)  # a hang after a reload would show here
            self.step()
            faults.append(self.publish()["faults"])
        kept = sum(self.engine.read_back(name) is not None for name in self.previous)
        return figures | {"faults": faults, "probe": probes, "readable": f"{kept} of {len(self.previous)}"}

    def prompts_run(self, batch: int, completion: int) -> None:
        from lit_qrl.types import SamplingParams

        self.engine.generate(self.prompts(batch), 1, 0, None, SamplingParams(max_tokens=completion, ignore_stop=True))

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        generator = self.torch.Generator().manual_seed(seed)
        return self.torch.randint(self.vocabulary, (count, self.args.prompt), generator=generator).tolist()

    def compare_speed(self, batch: int, n: int, sampling: Any) -> dict[str, float]:
        """Return tokens/s of the engine and of `LLM.generate`, alternating, each run with prompts of its own."""
        import vllm

        params = vllm.SamplingParams(
            n=1, max_tokens=sampling.max_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0,
            flat_logprobs=True, stop_token_ids=[] if sampling.ignore_stop else list(sampling.stop_token_ids),
        )  # fmt: skip
        best = {"engine": 0.0, "raw": 0.0}
        for repeat in range(self.args.repeats + 1):  # the first warms up
            for kind in best:
                prompts = self.prompts(batch, seed=1 + 2 * repeat + (kind == "raw"))
                self.engine.llm.reset_prefix_cache()
                self.sync()
                start = time.perf_counter()
                if kind == "engine":
                    drawn = self.engine.generate(prompts, n, repeat, None, sampling)
                    tokens = sum(len(completion.token_ids) for completion in drawn)
                else:
                    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
                    outputs = self.engine.llm.generate(inputs, params, use_tqdm=False)
                    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                speed = tokens / (time.perf_counter() - start)
                if repeat:
                    best[kind] = max(best[kind], speed)
        return {"engine": round(best["engine"], 1), "raw": round(best["raw"], 1)}

    def run_speed(self) -> dict[str, Any]:
        from lit_qrl.types import SamplingParams

        figures = self.ready()
        sampling = SamplingParams(max_tokens=self.args.completion, ignore_stop=True)
        return figures | {"speed": {str(b): self.compare_speed(b, 1, sampling) for b in self.args.batches}}

    def run_grpo(self) -> dict[str, Any]:
        from lit_qrl.types import SamplingParams

        figures = self.ready()
        stops = tuple(range(0, self.vocabulary, max(self.vocabulary // STOP_TOKENS, 1)))
        return figures | {"grpo": self.compare_speed(64, 8, SamplingParams(max_tokens=1024, stop_token_ids=stops))}

    def run_publish(self) -> dict[str, Any]:
        figures, times = self.ready(), []
        if self.device == "cuda":
            self.torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            self.step()
            times.append(self.publish())
        median = {part: round(statistics.median(t[part] for t in times[1:]), 4) for part in ("all", "load", "compare")}
        median |= self.parts()
        faults = sum(t["faults"] for t in times)
        figures["publish"] = median | {"second": round(times[0]["all"], 4), "faults": faults}
        figures["publish_gb"] = round(self.sent.bytes / 1e9, 3)
        if self.device == "cuda":
            figures["publish_peak_gib"] = round(self.torch.cuda.max_memory_allocated() / 2**30, 2)
        return figures

    def parts(self) -> dict[str, float]:
        """Return seconds of quantization alone, and of a bare reload of ready tensors, without receipts."""
        from lit_qrl.precision.export import export_tensors

        quantize, reload = [], []
        for _ in range(3):
            self.sync()
            start = time.perf_counter()
            ready = list(export_tensors(self.weights(), self.format, list(self.shapes)))
            self.sync()
            quantize.append(time.perf_counter() - start)
            start = time.perf_counter()
            self.engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": ready})
            self.sync()
            reload.append(time.perf_counter() - start)
        self.publish()
        return {"quantize": round(statistics.median(quantize), 4), "bare_reload": round(statistics.median(reload), 4)}

    def run_norms(self) -> dict[str, Any]:
        figures, times = self.ready(), []
        for version in range(100, 105):
            norms = [(name, tensor.clone()) for name, tensor in self.weights() if "norm" in name]
            self.sync()
            start = time.perf_counter()
            self.engine.perturb(iter(norms), version)
            self.sync()
            times.append(time.perf_counter() - start)
        return figures | {"norms_seconds": round(statistics.median(times[1:]), 5)}

    def run_lora(self) -> dict[str, Any]:
        from lit_qrl.rollout.receipt import SentLedger, compare

        self.start(max_lora_rank=LORA_RANK)
        times, faults = [], 0
        for version in range(1, 5):
            tensors = list(self.adapter(version))
            self.sync()
            start = time.perf_counter()
            sent = SentLedger(version)
            report = self.engine.load_adapter(sent.watch(iter(tensors)), version)
            faults += len(compare(sent, report.received))
            self.sync()
            times.append(time.perf_counter() - start)
        self.prompts_run(64, self.args.completion)
        start = time.perf_counter()
        self.prompts_run(64, self.args.completion)
        speed = 64 * self.args.completion / (time.perf_counter() - start)
        self.close()
        return {
            "lora_first_seconds": round(times[0], 4),
            "lora_seconds": round(statistics.median(times[1:]), 4),
            "lora_faults": faults,
            "lora_speed_64": round(speed, 1),
        }

    def adapter(self, seed: int):
        generator = self.torch.Generator(self.device).manual_seed(seed)
        options = {"device": self.device, "dtype": self.torch.bfloat16}
        for layer, (out, inside) in self.shapes.items():
            for end, shape in (("A", (LORA_RANK, inside)), ("B", (out, LORA_RANK))):
                tensor = self.torch.empty(shape, **options).normal_(std=0.02, generator=generator)
                yield f"base_model.model.{layer}.lora_{end}.weight", tensor

    def run_sleep(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for level in (1, 2):
            self.start(sleep_level=level)
            self.prompts_run(8, 32)
            times = {}
            for kind in ("sleep", "wake"):
                self.sync()
                start = time.perf_counter()
                getattr(self.engine, kind)()
                self.sync()
                times[kind] = time.perf_counter() - start
                if kind == "sleep" and self.device == "cuda":
                    times["free_gib"] = self.torch.cuda.mem_get_info()[0] / 2**30
            after = self.publish() if level == 2 else {"all": 0.0, "faults": 0}
            self.prompts_run(8, 32)
            times |= {"publish": after["all"], "faults": after["faults"]}
            figures[f"sleep_{level}"] = {name: round(value, 3) for name, value in times.items()}
        return figures


def table(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Print the figures, one row per format."""
    base = results.get("bf16", {})
    batches = [str(b) for b in args.batches]
    heads = ["format", "GiB", *(f"tok/s b={b}" for b in batches), "×bf16", "of raw", "grpo", "publish s", "lora s"]
    heads += ["norms ms", "sleep+wake s", "faults"]
    print("\n" + " | ".join(f"{head:>12}" for head in heads))
    for name, figures in results.items():
        speed = figures.get("speed", {})
        shown = [speed.get(b, {}).get("engine") for b in batches]
        plain = base.get("speed", {})
        gains = [
            f"{speed[b]['engine'] / plain[b]['engine']:.2f}"
            for b in batches
            if b in speed and plain.get(b, {}).get("engine")
        ]
        pairs = [*speed.values(), *([figures["grpo"]] if "grpo" in figures else [])]
        of_raw = [f"{pair['engine'] / pair['raw']:.2f}" for pair in pairs if pair.get("raw")]
        asleep = [figures[key]["sleep"] + figures[key]["wake"] for key in ("sleep_1", "sleep_2") if key in figures]
        faults = [figures.get("faults"), figures.get("publish", {}).get("faults"), figures.get("lora_faults")]
        norms = figures.get("norms_seconds")
        row = [name, figures.get("weights_gib"), *shown, "/".join(gains), "/".join(of_raw)]
        row += [
            figures.get("grpo", {}).get("engine"),
            figures.get("publish", {}).get("all"),
            figures.get("lora_seconds"),
        ]
        row += [None if norms is None else round(1e3 * norms, 2), "/".join(f"{s:.2f}" for s in asleep)]
        row.append(figures.get("error") or " ".join(str(f) for f in faults if f is not None))
        print(" | ".join(f"{'' if cell is None else cell!s:>12}" for cell in row))


if __name__ == "__main__":
    main()
