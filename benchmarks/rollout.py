"""Speed and memory of the vLLM engine by number format, and what publishing, verifying and sleeping cost.

    python benchmarks/rollout.py --shape 7b --formats bf16 fp8_row int4_group --sections speed publish --out out.json

Weights are random and made on the device, layer by layer unless they are published again; nothing is read or
downloaded. Each format has a process of its own, so that one that fails or hangs costs its own time alone, and so have
the sections lora and sleep, the latter one for each level: vLLM's sleeping allocator serves one engine. A section that
fails leaves the others' figures. Sections:

verify   the first publish and three more with every check on: ledgers, columns through the GEMM, read-back, and (small
         shapes only) the probe between them
speed    tokens/s at each batch size, against `LLM.generate` on the same object with the same log-prob settings: in
         turns after a warm-up of the same shape, the best run of each counts
grpo     the same for 64 prompts × 8 completions of uneven length, up to 1024 tokens
publish  seconds of the first publish and of later ones, quantization and receipts included, of the parts, and of the
         receipts alone, which are the difference to a publish that records and compares nothing
probe    seconds to score the probe on both sides, and their share of an iteration when every 50th publish is probed
steps    what a decode step is made of at each batch size: log-probs, seeds, kernels by kind, host
profile  where a publish spends its time: functions on the host, kernels and waits on the device
lora     seconds to replace a LoRA adapter of rank 32 over that base, and tokens/s with it
norms    seconds to replace the norms in place
sleep    seconds to sleep and to wake at levels 1 and 2, with the publish that follows and the memory that is freed

    python benchmarks/rollout.py --shape 32b --tensor-parallel 2 --formats bf16 fp8_row --sections speed --batches 64

measures one engine over two GPUs, a process on each; what its vLLM does by itself has the same processes. With
`--at-once` formats start beside each other and are measured in turn, which needs memory for all of them.
"""

import argparse
import contextlib
import cProfile
import fcntl
import json
import os
import pstats
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker import measured, weight_bytes  # beside this script

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHAPES: dict[str, dict[str, Any]] = {
    "mini": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "initializer_range": 0.05},
    "tiny": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "vocab_size": 2048, "initializer_range": 0.05},
    "mini_moe": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "initializer_range": 0.05}
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "32b": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "vocab_size": 152064},
    "30b_a3b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
    | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
}
SMALL = ("mini", "tiny", "mini_moe")  # the learner is there as a whole and can be scored
SECTIONS = ("verify", "speed", "grpo", "publish", "probe", "profile", "steps", "norms", "lora", "sleep")
APART = {"lora": ("lora",), "sleep": ("sleep_1", "sleep_2")}  # what has a process of its own
LORA_RANK = 32
SHOWN = 14  # rows of a profile
# About as many of a 152 k vocabulary that a random model's completion ends after 750 tokens on average.
STOP_TOKENS = 200
# Publishes between two probes: `WeightPublisher.probe_every`.
PROBE_EVERY = 50
CYCLES = 3  # of sleep, wake and publish; the first takes the host's memory for the weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="Qwen2.5's, Qwen3-30B-A3B's, or small ones")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["bf16", "fp8_row", "fp8_block", "int4_group", "nvfp4"],
        help="names of number formats; `fp8_row+head` has the output head in it too",
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=["speed", "publish"])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens of each completion")
    parser.add_argument("--grpo", type=int, nargs=3, default=[64, 8, 1024], help="prompts, completions, most tokens")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs of each kind; the best counts")
    parser.add_argument("--publishes", type=int, default=5, help="of the section publish; the first does not count")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of the engine, for speed and publish")
    parser.add_argument("--share", type=float, default=0.45, help="of the GPU's memory, for the engine")
    parser.add_argument("--start", choices=("quick", "compile", "eager"), default="quick", help="how decoding is run")
    parser.add_argument("--same-kernels", action="store_true", help="decode as for a learner in the same format")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for each format")
    parser.add_argument(
        "--at-once", action="store_true", help="start all formats beside each other, then measure one after the other"
    )
    parser.add_argument("--budget", type=float, default=3600, help="seconds for all; no format starts in the last 40")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument(
        "--adapter", action="store_true", help="verify, speed, grpo and steps under a LoRA of rank 32 beside the base"
    )
    parser.add_argument("--lora-formats", nargs="*", help="formats that run the section lora; all by default")
    parser.add_argument("--sleep-formats", nargs="*", help="formats that run the section sleep; all by default")
    parser.add_argument("--worker", nargs=3, metavar=("FORMAT", "SECTIONS", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, sections, file = args.worker
        args.sections = sections.split(",")
        work(args, name, file)
        return
    results: dict[str, Any] = {name: {} for name in args.formats}
    end = time.perf_counter() + args.budget

    def one(name: str) -> None:
        for sections in processes(args, name):
            left = end - time.perf_counter()
            found = measure(name, sections, min(args.timeout, left)) if left > 40 else {"error": "no time left"}
            if "error" in found:
                found["error"] = "; ".join(filter(None, (results[name].get("error"), found["error"])))
            results[name] |= found
        Turn.ready(name)
        if args.out:  # after each, so that a run that is cut short leaves what it had
            given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            args.out.write_text(json.dumps({"arguments": given, "device": device(), "results": results}, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        if args.at_once:
            os.environ[Turn.PLACE] = folder
        with ThreadPoolExecutor(len(args.formats) if args.at_once else 1) as pool:
            list(pool.map(one, args.formats))
    table(args, results)


class Turn:
    """Formats that start beside each other and are measured one after the other (`--at-once`)."""

    PLACE = "LIT_QRL_BENCHMARK_TURNS"
    """Environment variable: the folder in which a format says that it is ready, and in which the lock is."""

    @classmethod
    def ready(cls, name: str) -> None:
        """Say that a format has started, or will not."""
        if cls.PLACE in os.environ:
            (Path(os.environ[cls.PLACE]) / name).touch()

    @classmethod
    def take(cls, name: str, names: list[str]) -> None:
        """Wait until all have started and no other is measured; the turn ends with this process."""
        place = Path(os.environ[cls.PLACE])
        cls.ready(name)
        while not all((place / one).exists() for one in names):
            time.sleep(0.1)
        cls.lock = (place / "lock").open("w")
        fcntl.flock(cls.lock, fcntl.LOCK_EX)


def device() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    with contextlib.suppress(PackageNotFoundError):
        found["vllm"] = version("vllm")
    found["name"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return found


def processes(args: argparse.Namespace, name: str) -> list[list[str]]:
    """Return the sections of each process that a format has."""
    wanted = [
        s for s in args.sections if getattr(args, f"{s}_formats", None) is None or name in args.__dict__[f"{s}_formats"]
    ]
    together = [section for section in wanted if section not in APART]
    return [*([together] if together else []), *([one] for section in wanted for one in APART.get(section, ()))]


def measure(name: str, sections: list[str], timeout: float) -> dict[str, Any]:
    """Return what a process of its own finds for one format in `timeout` seconds."""
    figures = measured([name, ",".join(sections)], timeout)
    print(f"--- {name}: {json.dumps(figures)}", flush=True)
    return figures


def work(args: argparse.Namespace, name: str, file: str) -> None:
    figures: dict[str, Any] = {}
    bench = None
    rank, others = join(args.tensor_parallel) if args.tensor_parallel > 1 else (0, [])
    for section in args.sections:
        print(f"--- {name}: {section}", flush=True)
        start = time.perf_counter()
        try:
            if bench is None:
                bench = Bench(args, name)
                if Turn.PLACE in os.environ:
                    figures.update(bench.ready())
                    if rank == 0:
                        Path(file).write_text(json.dumps(figures))
                        Turn.take(name, args.formats)
                    bench.added(0)  # the other processes of this engine wait for the first
            figures.update(getattr(bench, f"run_{section}")())
        except Exception as error:
            traceback.print_exc()
            lines = str(error).splitlines()
            figures["error"] = f"{section}: {type(error).__name__}: {lines[0] if lines else ''}"[:300]
        figures[f"{section}_section_seconds"] = round(time.perf_counter() - start, 1)
        if rank == 0:
            Path(file).write_text(json.dumps(figures))
        print(f"--- {name}: {section} done in {figures[f'{section}_section_seconds']} s", flush=True)
    for other in others:  # they hold GPUs that the next format wants
        other.wait()
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind that can keep the interpreter alive


def join(size: int) -> tuple[int, list[subprocess.Popen]]:
    """Make this process one of `size`, and return its number and the others, which the first one starts."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        sys.exit(f"--tensor-parallel {size} needs as many GPUs, and there are {torch.cuda.device_count()}.")
    others = []
    os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")  # its multicast is not for hosts that others share
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "RANK": "0"}
        commands = [{**os.environ, "RANK": str(rank)} for rank in range(1, size)]
        others = [subprocess.Popen([sys.executable, *sys.argv], env=environment) for environment in commands]
    rank = int(os.environ["RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    return rank, others


class Clock:
    """Seconds since the last lap, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


class Bench:
    """One format: a learner's weights on the device, and an engine that is built when a section first needs it."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

        from lit_qrl import formats
        from lit_qrl.network.experts import expert_stacks
        from lit_qrl.network.linears import quantizable_layers

        self.torch, self.args, self.name = torch, args, name
        self.rank = torch.distributed.get_rank() if args.tensor_parallel > 1 else 0
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        plain, _, head = name.partition("+")
        self.format, self.head = None if plain == "bf16" else formats.get(plain), head == "head"
        small = args.shape in SMALL
        kind = Qwen3MoeConfig if "moe" in args.shape or "a3b" in args.shape else Qwen3Config if small else Qwen2Config
        self.limit = max(args.completion, args.grpo[2]) if "grpo" in args.sections else args.completion
        limit = args.prompt + self.limit + 8
        config = kind(**SHAPES[args.shape], max_position_embeddings=max(4096, limit), tie_word_embeddings=False)
        torch.manual_seed(0)
        with torch.device(self.device if small else "meta"):
            self.network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.network.requires_grad_(False).eval()
        self.shapes = quantizable_layers(self.network, head=self.head)
        self.stacks = {} if self.format is None else expert_stacks(self.network)
        self.vocabulary = config.vocab_size
        # Kept on the device, so that a publish draws nothing; where they do not fit they are drawn on the way.
        total = sum(p.numel() * p.element_size() for p in self.network.parameters() if p.is_meta)
        room = torch.cuda.mem_get_info()[1] * (0.9 - args.share) if self.device == "cuda" else 2**30
        self.keeps = total < room
        self.twice = 2 * total < room  # there is memory for the parts of a publish, one by one
        self.kept: dict[str, Any] = {}
        self.engine: Any = None
        self.version = -1
        self.previous: Any = None

    # ------------------------------------------------------------------------------------------------------- weights

    def weights(self):
        """Yield the learner's weights; random ones are made on the way, and kept for later publishes where they fit."""
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
                if self.keeps:
                    self.kept[name] = tensor
                yield name, tensor

    def step(self) -> None:
        """Move the learner by about one optimizer step."""
        tensors = self.kept.values() if self.kept else (p for p in self.network.parameters() if not p.is_meta)
        for tensor in tensors:
            tensor.mul_(1.0 + 2**-7 * (self.torch.rand((), device=tensor.device) < 0.5))

    def stream(self):
        """Yield what a publish sends."""
        from lit_qrl.network.experts import unstacked
        from lit_qrl.network.stream import weight_stream

        named = unstacked(self.weights(), self.stacks)
        return self.engine.arranged(weight_stream(named, self.format, list(self.shapes)))

    def publish(self) -> dict[str, float]:
        """Publish as the trainer does, and return seconds in all and of the verification."""
        from lit_qrl.run.imports import uncollected

        with uncollected():
            return self._publish()

    def _publish(self) -> dict[str, float]:
        from lit_qrl.receipts import ledger as receipt

        self.version += 1
        self.sync()
        clock = Clock()
        sampled = {name: self.shapes[name] for name in receipt.choose(list(self.shapes), self.version)}
        sent = receipt.SentLedger(self.version, self.format, sampled)
        report = self.engine.load_weights(sent.watch(self.stream(), self.engine.own_part), self.format, self.version)
        clock.lap("load")
        faults = receipt.compare(sent, report.received, self.previous)
        clock.lap("ledgers")
        faults += receipt.compare_columns(sent, self.engine.read_columns, exact=self.format is None)
        clock.lap("columns")
        names = list(sent.receipts())
        faults += receipt.compare_receipts(
            sent, receipt.read_receipts(self.engine.read_back, names[:: max(len(names) // 4, 1)])
        )
        self.sync()
        clock.lap("read_back")
        self.previous, self.report, self.sent = sent.receipts(), report, sent
        for fault in faults[:5]:
            print("FAULT", fault, flush=True)
        return {**clock.laps, "all": sum(clock.laps.values()), "faults": len(faults)}

    # --------------------------------------------------------------------------------------------------------- engine

    def start(self, **changes: Any) -> float:
        """Build an engine and fill it; return the seconds until then."""
        from lit_qrl.publish.probe import LENGTH
        from lit_qrl.rollout.engine import Learners, SamplerSpec
        from lit_qrl.rollout.vllm.engine import VLLMEngine
        from lit_qrl.types import SamplingParams

        self.close()
        args = self.args
        options = {
            "gpu_memory_utilization": args.share,
            "max_num_seqs": 512,
            "enforce_eager": args.start == "eager",
            "quick_start": args.start == "quick",
            "tensor_parallel_size": args.tensor_parallel,
            "same_kernels": args.same_kernels,
            "engine_args": args.engine_args,
        } | changes
        start = time.perf_counter()
        self.engine = VLLMEngine(**options)
        lora = self.lora_config() if options.get("max_lora_rank") else None
        spec = SamplerSpec(
            sampling=SamplingParams(max_tokens=self.limit, ignore_stop=True),
            format=self.format,
            quantize_head=self.head,
            adapter=lora,
            prompt_limit=max(args.prompt, LENGTH),
            learners=Learners(local=(self.rank, args.tensor_parallel), whole=(self.rank, args.tensor_parallel)),
        )
        self.engine.validate(spec)
        self.engine.setup(spec, SimpleNamespace(network=self.network, lora=lora))
        self.engine._start(self.format)
        self.sync()
        seconds = time.perf_counter() - start
        self.previous = None
        self.sync()
        begun = time.perf_counter()
        for _ in self.weights():  # drawn before the clock of the first publish runs
            pass
        self.sync()
        self.drawing = time.perf_counter() - begun
        self.first = self.publish()
        return seconds

    def ready(self) -> dict[str, Any]:
        if self.engine is not None:
            return {}
        seconds: float = self.start(**({"max_lora_rank": LORA_RANK} if self.args.adapter else {}))
        if self.args.adapter:
            self.engine.load_adapter(self.adapter(1), 1)
        return {
            "start_seconds": round(seconds, 1),
            "first_publish": round(self.first["all"], 3),
            "drawing_in_first_publish": 0.0 if self.kept or self.args.shape in SMALL else round(self.drawing, 3),
            "weights_gib": round(weight_bytes(self.engine.live.model) / 2**30, 3),
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
        from lit_qrl.publish.probe import Probe, learner_scores

        figures = self.ready()
        activations = self.format is not None and self.format.quantizes_activations
        probe = Probe(self.vocabulary, activations)
        faults, probes = [self.first["faults"]], []
        for _ in range(3):
            if self.args.shape in SMALL:
                scores = learner_scores(self.network, probe.tokens, self.format, head=self.head)
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

    def compare_speed(self, batch: int, n: int, sampling: Any) -> dict[str, Any]:
        """Return the best tokens/s of the engine and of `LLM.generate`, each run with prompts of its own.

        A run of the engine in the full shape comes first and is not timed; then both take turns.
        """
        import vllm

        params = vllm.SamplingParams(
            n=1, max_tokens=sampling.max_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0,
            flat_logprobs=True, stop_token_ids=[] if sampling.ignore_stop else list(sampling.stop_token_ids),
        )  # fmt: skip
        runs: dict[str, list[float]] = {"engine": [], "raw": []}
        tokens, fastest = 0, float("inf")
        for turn, kind in enumerate(["engine", *["engine", "raw"] * self.args.repeats]):
            prompts = self.prompts(batch, seed=1 + turn)
            self.engine.llm.reset_prefix_cache()
            self.sync()
            start = time.perf_counter()
            if kind == "engine":  # of several processes, each asks for some
                own = list(range(self.rank, batch, self.args.tensor_parallel))
                drawn = self.engine.generate([prompts[i] for i in own], n, turn, None, sampling, own)
                count = self.added(sum(len(completion.token_ids) for completion in drawn))
            else:
                self.torch.manual_seed(turn)  # alike in all processes of the engine
                inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
                outputs = self.engine.llm.generate(inputs, params, use_tqdm=False, lora_request=self.request())
                count = sum(len(output.outputs[0].token_ids) for output in outputs)
            seconds = time.perf_counter() - start
            if turn:
                runs[kind].append(round(count / seconds, 1))
            if turn and kind == "engine" and seconds < fastest:
                fastest, tokens = seconds, count
        best: dict[str, Any] = {kind: max(speeds) for kind, speeds in runs.items()}
        return best | {"tokens": tokens, "seconds": round(fastest, 3), "runs": runs}

    def request(self) -> Any:
        """Return what a request of vLLM's own carries to be drawn under the adapter; None without one."""
        from vllm.lora.request import LoRARequest

        from lit_qrl.rollout.vllm.adapter import ADAPTER_ID

        return LoRARequest("policy", ADAPTER_ID, "in-memory") if self.args.adapter else None

    def added(self, count: int) -> int:
        """Return the sum over the processes of the engine."""
        if self.args.tensor_parallel > 1:
            total = self.torch.tensor(count)
            self.torch.distributed.all_reduce(total)
            count = int(total)
        return count

    def run_speed(self) -> dict[str, Any]:
        from lit_qrl.types import SamplingParams

        figures = self.ready()
        sampling = SamplingParams(max_tokens=self.args.completion, ignore_stop=True)
        figures["speed"] = {str(b): self.compare_speed(b, 1, sampling) for b in self.args.batches}
        return figures | ({"agreement": self.agreement()} if self.args.adapter else {})

    def agreement(self) -> dict[str, float]:
        """Return by how much log-probs of drawn tokens differ from what the engine scores them with."""
        from lit_qrl.types import SamplingParams

        prompts = self.prompts(8, seed=77)
        drawn = self.engine.generate(prompts, 1, 5, None, SamplingParams(max_tokens=96, ignore_stop=True))
        off = []
        scores = self.engine.score([p + list(c.token_ids) for p, c in zip(prompts, drawn, strict=True)])
        for completion, scored in zip(drawn, scores, strict=True):
            own = self.torch.tensor(completion.logprobs, dtype=self.torch.float64)
            off.append(own - scored[-len(own) :].double().cpu())
        off = self.torch.cat(off)
        found = {"mean_abs": off.abs().mean(), "mean": off.mean(), "largest": off.abs().max()}
        print(
            "log-probs drawn against scored:", {key: round(value.item(), 5) for key, value in found.items()}, flush=True
        )
        return {key: round(value.item(), 6) for key, value in found.items()}

    def run_grpo(self) -> dict[str, Any]:
        from lit_qrl.types import SamplingParams

        figures = self.ready()
        stops = tuple(range(0, self.vocabulary, max(self.vocabulary // STOP_TOKENS, 1)))
        prompts, n, longest = self.args.grpo
        sampling = SamplingParams(max_tokens=longest, stop_token_ids=stops)
        return figures | {"grpo": self.compare_speed(prompts, n, sampling)}

    def run_publish(self) -> dict[str, Any]:
        figures, times = self.ready(), []
        if self.device == "cuda":
            self.torch.cuda.reset_peak_memory_stats()
        for _ in range(self.args.publishes):
            self.step()
            times.append(self.publish())
        median = {part: round(statistics.median(t[part] for t in times[1:]), 4) for part in times[0]}
        bare = statistics.median(self.unverified() for _ in range(self.args.publishes - 1))
        median |= (self.parts() if self.twice else {}) | {
            "unverified": round(bare, 4),
            "receipts": round(median["all"] - bare, 4),
        }
        faults = sum(t["faults"] for t in times)
        figures["publish"] = median | {"second": round(times[0]["all"], 4), "faults": faults}
        routes = self.engine.live.routes
        copied = 0 if routes is None else sum(routes.copies(name) for name in routes.members)
        figures["copied_modules"] = f"{copied} of {len(routes.members) if routes else 0}"
        figures["publish_gb"] = round(self.sent.bytes / 1e9, 3)
        if self.device == "cuda":
            figures["publish_peak_gib"] = round(self.torch.cuda.max_memory_allocated() / 2**30, 2)
        return figures

    def unverified(self) -> float:
        """Return the seconds of a publish in which nobody records or compares anything."""
        from unittest import mock

        from lit_qrl.receipts.checksum import Checksums
        from lit_qrl.receipts.ledger import Ledger

        def passed(ledger: Any, name: str, tensor: Any) -> None:
            ledger.bytes += tensor.numel() * tensor.element_size()

        def ignored(sums: Any, name: str, tensor: Any) -> None:  # a mock would keep every tensor
            pass

        self.step()
        self.version += 1
        self.sync()
        start = time.perf_counter()
        with (
            mock.patch.object(Ledger, "record", passed),
            mock.patch.object(Ledger, "record_stack", ignored),
            mock.patch.object(Checksums, "add", ignored),
        ):
            stream = self.stream()
            self.engine.load_weights(stream, self.format, self.version)
        self.sync()
        return time.perf_counter() - start

    def run_probe(self) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        from lit_qrl.publish.probe import Probe, learner_scores

        figures = self.ready()
        network = self.network
        if self.kept:
            with self.torch.device(self.device):
                network = AutoModelForCausalLM.from_config(self.network.config, dtype=self.torch.bfloat16)
            network.load_state_dict(self.kept, assign=True)
            network.requires_grad_(False).eval()
        probe = Probe(self.vocabulary, self.format is not None and self.format.quantizes_activations)
        laps: dict[str, list[float]] = {}
        for _ in range(3):  # the first compiles
            self.sync()
            clock = Clock()
            scores = learner_scores(network, probe.tokens, self.format, head=self.head)
            self.sync()
            clock.lap("learner")
            probe.compare(self.engine.score(probe.tokens), scores)
            self.sync()
            clock.lap("engine")
            for name, seconds in clock.laps.items():
                laps.setdefault(name, []).append(seconds)
        best = {name: round(min(seconds), 4) for name, seconds in laps.items()}
        jittered = learner_scores(network, probe.tokens, self.format, head=self.head, jitter=2**-8)
        carried = Probe(self.vocabulary).compare(jittered, scores).mean
        probe.baseline = None
        first = probe.compare(self.engine.score(probe.tokens), scores, jittered)
        found = {"mean": first.mean, "last_bits_carry": carried, "bound": first.bound, "passed": first.passed}
        return figures | {"probe_seconds": best, "first_probe": found}

    def parts(self) -> dict[str, float]:
        """Return seconds of quantization alone, with the sender's receipts, and of vLLM's bare reload of the result."""
        from lit_qrl.receipts.ledger import SentLedger

        laps: dict[str, list[float]] = {}
        for version in range(3):
            self.sync()
            clock = Clock()
            for _ in self.stream():
                pass
            self.sync()
            clock.lap("quantize")
            sent = SentLedger(version, self.format)
            for _ in sent.watch(self.stream()):
                pass
            sent.receipts()
            clock.lap("quantize_and_receipts")
            ready = list(self.stream())
            self.sync()
            clock.lap("ready")
            self.engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": ready})
            self.sync()
            clock.lap("bare_reload")
            del ready
            for name, seconds in clock.laps.items():
                laps.setdefault(name, []).append(seconds)
        self.publish()
        return {name: round(statistics.median(seconds), 4) for name, seconds in laps.items() if name != "ready"}

    def run_profile(self) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        figures = self.ready()
        self.step()
        self.publish()
        host = cProfile.Profile()
        host.enable()
        whole = self.publish()["all"]
        host.disable()
        rows = []
        for (file, _, function), (_, calls, own, total, _) in pstats.Stats(host).stats.items():  # pyright: ignore
            rows.append((round(1e3 * total, 2), round(1e3 * own, 2), calls, f"{Path(file).name}:{function}"))
        by_total = sorted((row for row in rows if "lit_qrl" in row[3] or ".py:" in row[3]), reverse=True)
        by_own = sorted(rows, key=lambda row: -row[1])
        figures["profile_host"] = {"all": round(whole, 4), "by_total": by_total[:40], "by_own": by_own[:25]}
        print(f"host, {1e3 * whole:.0f} ms under cProfile: own ms, ms with callees, calls, function")
        for total, own, calls, function in by_own[:SHOWN]:
            print(f"{own:9.1f} {total:9.1f} {calls:7d} {function[-90:]}")
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device == "cuda")
        with profile(activities=activities) as device:
            self.publish()
        events = []
        for e in device.key_averages():
            on_device = getattr(e, "self_device_time_total", 0.0)
            events.append((round(1e-3 * on_device, 2), round(1e-3 * e.self_cpu_time_total, 2), e.count, e.key))
        kernels = sorted(events, reverse=True)
        waits = [event for event in events if event[3].startswith(("cuda", "cu"))]
        figures["profile_device"] = {
            "busy": round(sum(event[0] for event in events), 2),
            "kernels": kernels[:25],
            "calls": sorted(waits, key=lambda event: -event[1])[:12],
        }
        print(f"device busy {figures['profile_device']['busy']} ms: ms on it, ms on the host, calls, name")
        for event in [*kernels[:SHOWN], *figures["profile_device"]["calls"][:6]]:
            print(f"{event[0]:9.2f} {event[1]:9.2f} {event[2]:7d} {event[3][:90]}")
        return figures

    def run_steps(self) -> dict[str, Any]:
        import decode_steps  # beside this script

        figures = self.ready()
        return figures | {"steps": decode_steps.run(self, self.args.batches)}

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
        from lit_qrl.receipts.ledger import SentLedger, compare

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

    def run_sleep_1(self) -> dict[str, Any]:
        return {"sleep_1": self.cycles(1)}

    def run_sleep_2(self) -> dict[str, Any]:
        return {"sleep_2": self.cycles(2)}

    def cycles(self, level: int) -> dict[str, Any]:
        """Return seconds to sleep, wake and publish, and GiB freed: medians, and those of the first cycle."""
        self.start(sleep_level=level)
        self.prompts_run(8, 32)
        cycles: list[dict[str, float]] = []
        for _ in range(CYCLES):
            times: dict[str, float] = {}
            before = self.free()
            for kind in ("sleep", "wake"):
                self.sync()
                start = time.perf_counter()
                getattr(self.engine, kind)()
                self.sync()
                times[kind] = time.perf_counter() - start
                if kind == "sleep":
                    times["freed_gib"] = self.free() - before
            self.step()
            after = self.publish()
            self.prompts_run(8, 32)
            cycles.append(times | {"publish": after["all"], "faults": after["faults"]})
        last = {name: round(statistics.median(cycle[name] for cycle in cycles[1:]), 3) for name in cycles[0]}
        last["faults"] = sum(cycle["faults"] for cycle in cycles)
        self.close()
        return last | {"first_cycle": {k: round(v, 3) for k, v in cycles[0].items()}}

    def free(self) -> float:
        """Return the free memory of the GPU, in GiB."""
        return self.torch.cuda.mem_get_info()[0] / 2**30 if self.device == "cuda" else 0.0


def shares(figures: dict[str, Any]) -> list[float | None]:
    """Return what receipts and the probe cost, in percent of the GRPO-shaped generation alone.

    An iteration has the learner's scores and updates too, so that its own shares are smaller.
    """
    seconds = figures.get("grpo", {}).get("seconds")
    receipts = figures.get("publish", {}).get("receipts")
    probe = figures.get("probe_seconds")
    amortised = None if probe is None else (probe["learner"] + probe["engine"]) / PROBE_EVERY
    return [None if cost is None or not seconds else round(100 * cost / seconds, 2) for cost in (receipts, amortised)]


def table(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Print the figures, one row per format."""
    base = results.get("bf16", {})
    batches = [str(b) for b in args.batches]
    heads = ["format", "GiB", *(f"tok/s b={b}" for b in batches), "×bf16", "of raw", "grpo", "publish s", "first s"]
    heads += ["quantize s", "receipts %", "probe %", "lora s", "lora tok/s", "norms ms", "sleep+wake s", "faults"]
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
            figures.get("first_publish"),
            figures.get("publish", {}).get("quantize"),
            *shares(figures),
            figures.get("lora_seconds"),
            figures.get("lora_speed_64"),
        ]
        row += [None if norms is None else round(1e3 * norms, 2), "/".join(f"{s:.2f}" for s in asleep)]
        row.append(figures.get("error") or " ".join(str(f) for f in faults if f is not None))
        print(" | ".join(f"{'' if cell is None else cell!s:>12}" for cell in row))


if __name__ == "__main__":
    main()
