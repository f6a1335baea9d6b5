"""Whole runs of `lit-qrl fit`, timed from outside: wall clock between rows of metrics.csv, peak memory of the device.

    python benchmarks/iteration.py --cases full-1.5b lora-7b qerl-32b --checkpoints none auto --out out.json

Each run is the command that a user would type, in a process of its own; this one reads `metrics.csv` every 20 ms and
asks the driver for the memory in use; each row is printed as it comes. Models have Qwen2.5's shapes and random weights,
written to a folder first, so that loading, checkpoints and resuming are a user's too; those of several GPUs, and
full-7b's, are drawn by the run itself, which starts sooner. Iterations before the third do not count; figures are
medians.

full-1.5b, full-3b  full fine-tuning in bf16, TIS
short-1.5b, uneven-1.5b  the same with 64 tokens; with up to 2048, where one token in 500 ends a completion
full-7b    the same with AdamW of 8 bits
lora-7b    LoRA of rank 32 on all linear layers in bf16, TIS
qerl-32b   NVFP4 base from a quantized folder under a LoRA of rank 32
parts-3b, parts-8b  full fine-tuning with fp32 masters in parts (`ShardedStrategy`) on `--devices` GPUs, a vLLM on each
apart-8b   lora-7b at 8B, the adapter merged into each publish, vLLM in a process of its own on another GPU
llada-8b   masked diffusion of LLaDA-8B's shape, 16 completions: LoRA of rank 128, FP8 sampler, AIS
moe-30b    Qwen3-30B-A3B's shape, drawn at random and packed layer by layer: attention and experts in 4 bits (`--arms
           nvfp4`, `int4_group`) under a LoRA of rank 32 on attention, with routing replay or without (`--replay`);
           the first run on a host compiles Marlin's kernels for a minute, unless CUDA_CACHE_PATH has them

    python benchmarks/iteration.py --cases full-3b --arms bf16 fp8_row UnifiedFP8 QATAligned --checkpoints none
    python benchmarks/iteration.py --cases lora-7b --arms bf16 fp8_row PackedLoRA-fp8_row --checkpoints none
    python benchmarks/iteration.py --cases parts-8b --devices 2 --checkpoints none
    python benchmarks/iteration.py --cases apart-8b --arms fp8_row --schedules on_policy one_step_off --checkpoints none
    python benchmarks/iteration.py --cases apart-8b --transfer ipc nccl --iterations 6 --checkpoints none
    python benchmarks/iteration.py --cases parts-8b --devices 2 --arms fp8_row --then bf16 --turn 4 --checkpoints none
    python benchmarks/iteration.py --cases full-1.5b --peers here trl trl here --checkpoints none
    python benchmarks/iteration.py --cases moe-30b --arms nvfp4 --replay on off --checkpoints none

`--arms`: what the sampler is published in, or a precision plugin. `--peers trl` runs `trl_iteration.py`, the
same iteration with TRL's trainer and its vLLM in the same process. `--tiny` tries every line on a CPU.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qerl import SHAPES, write_model  # noqa: E402  beside this script

SHAPES["8b"] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SHAPES["1.5b"] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SHAPES["llada-8b"] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 126464,
    "mask_token_id": 126336,
}
SHAPES["30b-a3b"] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SHAPES["tiny-mixture"] = {**SHAPES["tiny"], **_FEW, "head_dim": 64}
SHAPES["tiny-denoiser"] = {**SHAPES["tiny"], "mask_token_id": 511}
LORA = {"class_path": "peft.LoraConfig", "init_args": {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"}}
LARGE_LORA = {"class_path": "peft.LoraConfig", "init_args": {**LORA["init_args"], "r": 128}}
EIGHT_BIT = "bitsandbytes.optim.AdamW8bit"
TIS = {"class_path": "TruncatedIS"}
CASES: dict[str, dict[str, Any]] = {
    "full-1.5b": {"shape": "1.5b", "prompts": 16, "completion": 512, "micro_batches": 8},
    "short-1.5b": {"shape": "1.5b", "prompts": 16, "completion": 64, "micro_batches": 2},
    "uneven-1.5b": {"shape": "1.5b", "prompts": 16, "completion": 2048, "micro_batches": 16, "stops": 300},
    "full-3b": {"shape": "3b", "prompts": 16, "completion": 512, "micro_batches": 16},
    "parts-3b": {"shape": "3b", "prompts": 16, "completion": 512, "micro_batches": "auto", "parts": True}
    | {"drawn": True},
    "parts-8b": {"shape": "8b", "prompts": 16, "completion": 512, "micro_batches": "auto", "parts": True}
    | {"drawn": True},
    "full-7b": {
        "shape": "7b",
        "prompts": 16,
        "completion": 512,
        "micro_batches": 16,
        "optimizer": "bitsandbytes.optim.AdamW8bit",
        "drawn": True,
    },
    "lora-7b": {"shape": "7b", "prompts": 16, "completion": 512, "micro_batches": 16, "lora": LORA},
    "qerl-32b": {"shape": "32b", "prompts": 4, "completion": 300, "micro_batches": 8, "lora": LORA, "format": "nvfp4"},
    "apart-8b": {"shape": "8b", "prompts": 8, "completion": 384, "micro_batches": "auto", "lora": LORA, "apart": True}
    | {"drawn": True},
    "moe-30b": {"shape": "30b-a3b", "prompts": 4, "completion": 300, "micro_batches": 2, "lora": LORA, "replay": "on"}
    | {"drawn": True},
    "llada-8b": {"shape": "llada-8b", "prompts": 2, "completion": 256, "micro_batches": 4, "lora": LARGE_LORA},
}
PLUGINS: dict[str, dict[str, Any]] = {
    "QATAligned": {"class_path": "QATAligned", "init_args": {"weights": "fp8_row"}},
    "UnifiedFP8": {"class_path": "UnifiedFP8", "init_args": {}},
    **{
        f"PackedLoRA-{format}": {"class_path": "PackedLoRA", "init_args": {"format": format, "autocast": "bf16"}}
        for format in ("fp8_row", "fp8_block")
    },
}
ARMS = ("bf16", "fp8_row", *PLUGINS, "nvfp4", "int4_group")
PACKED = ("nvfp4", "int4_group")
"""What a base that is drawn at random is packed in."""
WARM_UP = 2
PHASES = ("publish", "rollout", "wait", "score", "update", "evaluate", "checkpoint", "other")


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--checkpoints", nargs="+", choices=("none", "auto", "every"), default=["none", "auto"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["bf16"], help="of cases without a quantized base")
    parser.add_argument("--replay", nargs="+", choices=("on", "off"), default=["on"], help="of routes, in mixtures")
    parser.add_argument("--peers", nargs="+", choices=("here", "trl"), default=["here"], help="one run each, in order")
    parser.add_argument("--schedules", nargs="+", default=["on_policy"], help="of the cases with an engine apart")
    parser.add_argument(
        "--transfer",
        nargs="+",
        default=["auto"],
        metavar="WAY",
        help="how weights reach an engine apart: ipc, nccl, memory, …; several take turns, --turn iterations each",
    )
    parser.add_argument("--turn", type=int, default=3, help="publishes of each --transfer, the first of which warms up")
    parser.add_argument("--then", choices=("bf16", "fp8_row"), help="format of the sampler from iteration --turn on")
    parser.add_argument("--prompts", type=int, help="of an iteration (default: the case's)")
    parser.add_argument("--stacks", action="store_true", help="write every second what the run's processes are in")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of the cases in parts")
    parser.add_argument("--iterations", type=int, default=7, help="of each run, the first two of which do not count")
    parser.add_argument("--completion", type=int, help="tokens of a completion (default: the case's)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--models", type=Path, help="where model folders are kept (default: nowhere)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for each run")
    parser.add_argument(
        "--set", nargs=argparse.REMAINDER, default=[], help="last: further options of fit, such as --a.b c"
    )
    parser.add_argument("--tiny", action="store_true", help="toy shapes and lengths, on a CPU")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


def main() -> None:
    """Run every case and print one table."""
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs end with this process
    results: list[dict[str, Any]] = []
    try:
        measure_all(args, results)
    finally:  # also of what was measured before somebody ended it
        table(results)


def measure_all(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Run every case; what was found is added to `results` and written as it comes."""
    with tempfile.TemporaryDirectory() as temporary:
        models = args.models or Path(temporary)
        for name in args.cases:
            case = dict(CASES[name])
            if args.tiny:
                shape = "tiny-denoiser" if denoises(case) else "tiny-mixture" if mixes(case) else "tiny"
                case |= {"shape": shape, "prompts": 4, "completion": 8, "micro_batches": 2}
            case["completion"] = args.completion or case["completion"]
            case["prompts"] = args.prompts or case["prompts"]
            drawn = bool(case.get("drawn"))
            folder = model_folder(models, case["shape"], case.get("format"), case.get("stops", 1), drawn)
            schedules = args.schedules if case.get("apart") else ["on_policy"]
            replay = args.replay if mixes(case) else ["off"]
            for number, (checkpoints, arm, peer, schedule, routes) in enumerate(
                itertools.product(args.checkpoints, args.arms, args.peers, schedules, replay)
            ):
                run = Path(temporary) / f"{name}-{number}"
                case |= {"arm": arm, "peer": peer, "schedule": schedule, "replay": routes}
                what = {"case": name, "arm": arm, "peer": peer, "checkpoints": checkpoints}
                what |= {"schedule": schedule} if case.get("apart") else {}
                what |= {"replay": routes} if mixes(case) else {}
                result = {**what, **measure(args, case, folder, run, checkpoints)}
                print(json.dumps(result), flush=True)
                results.append(result)
                if args.out:
                    args.out.write_text(json.dumps(results, indent=1))


def denoises(case: dict[str, Any]) -> bool:
    """Return whether a case is of masked diffusion."""
    return "mask_token_id" in SHAPES[case["shape"]]


def mixes(case: dict[str, Any]) -> bool:
    """Return whether a case is of a mixture of experts."""
    return "num_experts" in SHAPES[case["shape"]]


# --------------------------------------------------------------------------------------------------------------- model


def model_folder(models: Path, shape: str, format: str | None, stops: int = 1, drawn: bool = False) -> Path:
    """Return the folder of a model of that shape with random weights, plain or quantized, made where it is not.

    So many of its words end a completion; with random weights all are about as likely. A folder of a model that is
    drawn has no weights.
    """
    folder = models / "-".join(
        filter(None, (shape, format, f"{stops}-stops" if stops > 1 else None, "drawn" if drawn else None))
    )
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    case = {"shape": shape}
    if drawn:
        write_outline(shape, folder, stops)
        return folder
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen3MoeConfig

    from lit_qrl import formats
    from lit_qrl.network.folder import FolderWriter
    from lit_qrl.network.linears import quantizable_linears
    from lit_qrl.network.llada import LLaDAConfig
    from lit_qrl.network.stream import weight_stream

    kind = LLaDAConfig if denoises(case) else Qwen3MoeConfig if mixes(case) else Qwen2Config
    config = kind(**SHAPES[shape], max_position_embeddings=4096, dtype="bfloat16")
    write_model(config, folder)
    GenerationConfig(eos_token_id=stop_words(config.vocab_size, stops)).save_pretrained(folder)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in network.named_parameters():
            made = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            if parameter.ndim == 2:
                made.normal_(std=0.02, generator=generator)
            else:
                made.fill_(1.0 if "norm" in name else 0.0)
            yield name, made

    chosen = None if format is None else formats.get(format)
    writer = FolderWriter(folder, 4 << 30)
    with torch.no_grad():
        for name, tensor in weight_stream(weights(), chosen, list(quantizable_linears(network)), torch.bfloat16):
            writer.add(name, tensor)
    writer.close()
    if chosen is not None:
        content = json.loads((folder / "config.json").read_text())
        content["quantization_config"] = chosen.quantization_config(["lm_head"])
        (folder / "config.json").write_text(json.dumps(content))
    return folder


def stop_words(vocabulary: int, stops: int) -> list[int]:
    """Return the words that end a completion."""
    return [1, *range(vocabulary - stops + 1, vocabulary)]


def write_outline(shape: str, folder: Path, stops: int) -> None:
    """Write what `write_model` does, in a hundredth of the time: without the libraries whose import takes seconds."""
    kind = ("qwen3_moe", "Qwen3MoeForCausalLM") if mixes({"shape": shape}) else ("qwen2", "Qwen2ForCausalLM")
    size = SHAPES[shape]["vocab_size"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": word, **special} for i, word in enumerate(("<pad>", "<eos>"))],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w2"},
    }
    files = {
        "config.json": {
            **SHAPES[shape],
            "model_type": kind[0],
            "architectures": [kind[1]],
            "max_position_embeddings": 4096,
            "dtype": "bfloat16",
        },
        "generation_config.json": {"eos_token_id": stop_words(size, stops)},
        "tokenizer/tokenizer.json": tokenizer,
        "tokenizer/tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<eos>",
        },
    }
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


# ----------------------------------------------------------------------------------------------------------------- run


def measure(args: argparse.Namespace, case: dict[str, Any], model: Path, run: Path, checkpoints: str) -> dict[str, Any]:
    """Return the figures of one run, or what went wrong."""
    import yaml

    run.parent.mkdir(parents=True, exist_ok=True)
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(configuration(args, case, model, run, checkpoints)))
    log = run.with_suffix(".log")
    if args.out:  # beside the figures: the run's folder goes with this process
        args.out.parent.mkdir(parents=True, exist_ok=True)
        log = args.out.with_name(f"{args.out.stem}-{run.name}.log")
    runner = ["-m", "lit_qrl.cli"]
    if args.stacks:
        runner = [str(Path(__file__).with_name("sampled.py")), str(log.with_suffix(".stacks"))]
    command = [sys.executable, *runner, "fit", "--config", str(config), *args.set]
    if case["peer"] == "trl":
        command = [sys.executable, str(Path(__file__).with_name("trl_iteration.py")), str(config), str(run)]
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT), *sys.path[1:]])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    read, write = os.pipe()
    writer = threading.Thread(target=stamped, args=(os.fdopen(read, errors="replace"), log), daemon=True)
    writer.start()
    options = {"stdout": write, "stderr": write, "cwd": run.parent, "start_new_session": True}
    processes = [subprocess.Popen(command, env=environment | joins, **options) for joins in meeting(args, case)]
    os.close(write)
    begun = time.monotonic()
    wanted = args.iterations if checkpoints == "none" else sys.maxsize  # then what follows is of no interest
    process = processes[0]
    try:
        ends, peak, deadline = watch(process, run / "metrics.csv", time.monotonic() + args.timeout, wanted)
    finally:  # engines of theirs, too
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
        writer.join(5)
    rows = read_rows(run / "metrics.csv")
    apart = mismatch(rows)
    if (process.returncode and len(rows) < wanted) or len(rows) <= WARM_UP + 1:
        return {
            "error": f"status {process.returncode}",
            "seen": rows,
            "walls": [round(b - a, 2) for a, b in itertools.pairwise(ends)],
            "peak_gib": peak,
            **apart,
            **start(begun, ends, rows),
            "log": log.read_text()[-8000:],
        }
    wall = [b - a for a, b in itertools.pairwise(ends)][WARM_UP - 1 :]
    phases = {
        phase: round(statistics.median(row.get(f"time/{phase}", 0.0) for row in rows[WARM_UP:]), 3) for phase in PHASES
    }
    without = [
        row["time/iteration"] - row.get("time/checkpoint", 0.0) - row.get("time/other", 0.0) for row in rows[WARM_UP:]
    ]
    saved = run / "checkpoints" / "last.ckpt"
    return {
        "wall": round(statistics.median(wall), 3),
        "mean_wall": round(statistics.mean(wall), 3),
        "phases_sum": round(statistics.median(without), 3),
        "row_iteration": round(statistics.median(row["time/iteration"] for row in rows[WARM_UP:]), 3),
        **apart,
        **start(begun, ends, rows),
        "walls": [round(one, 2) for one in wall],
        "checkpoint_seconds": [round(row.get("time/checkpoint", 0.0), 2) for row in rows],
        "checkpoint_gib": round(saved.stat().st_size / 2**30, 2) if saved.exists() else None,
        "peak_gib": peak,
        "rows": [{name: round(value, 3) for name, value in row.items() if told(name)} for row in rows],
        "drawn_ahead_in": round(statistics.median(row.get("rollout/seconds_ahead", 0.0) for row in rows[WARM_UP:]), 3),
        "publish_parts": publish_parts(rows[WARM_UP:]),
        "first_publish_parts": publish_parts(rows[:1]),
        "micro_batches": rows[-1].get("update/micro_batches"),
        "publish_gigabytes": round(rows[-1].get("publish/bytes", 0.0) / 1e9, 3),
        "seconds_in_all": round(time.monotonic() - deadline + args.timeout, 1),
        **phases,
    }


def publish_parts(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the seconds that a publish's parts take."""
    names = [name for name in rows[-1] if name.startswith("time/publish_")]
    return {
        name.removeprefix("time/publish_"): round(statistics.median(row.get(name, 0.0) for row in rows), 3)
        for name in names
    }


def start(begun: float, ends: list[float], rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the seconds until the first iteration, and those of it and of its publish, which starts the engine."""
    if not rows or not ends:
        return {}
    first = rows[0]["time/iteration"]
    before = {
        "start": ends[0] - begun - first,
        "first_iteration": first,
        "first_publish": rows[0].get("time/publish", 0.0),
    }
    return {name: round(seconds, 1) for name, seconds in before.items()}


def mismatch(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the extremes of the ratio of learner to sampler, 1 and 1 where they agree to the last bit, and its KL."""
    found = [row for row in rows if "mismatch/ratio_min" in row]
    if not found:
        return {}
    return {
        "ratio_min": min(row["mismatch/ratio_min"] for row in found),
        "ratio_max": max(row["mismatch/ratio_max"] for row in found),
        "abs_log_ratio": max(row["mismatch/abs_log_ratio"] for row in found),
        "kl_k3": statistics.mean(row["mismatch/kl_k3"] for row in found),
    }


def configuration(
    args: argparse.Namespace, case: dict[str, Any], model: Path, run: Path, checkpoints: str
) -> dict[str, Any]:
    """Return the YAML of a run."""
    import random

    prompt = 12 if args.tiny else args.prompt
    draw = random.Random(0)
    data = run.with_suffix(".jsonl")
    vocabulary = SHAPES[case["shape"]]["vocab_size"]
    rows = ({"question": " ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(prompt))} for _ in range(256))
    data.write_text("".join(json.dumps({**row, "answer": "1"}) + "\n" for row in rows))
    engine = {"class_path": "TransformersEngine"}
    if not args.tiny:
        share = {"32b": 0.5, "8b": 0.25, "30b-a3b": 0.25}.get(case["shape"], 0.35)
        options = {"gpu_memory_utilization": share, "quick_start": True, "max_lora_rank": 32 if "lora" in case else 0}
        if case.get("parts") or case.get("apart") or mixes(case):  # a start records no more graphs than it needs
            sequences = case["prompts"] * 8 // (args.devices if case.get("parts") else 1)
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, sequences]}
            options |= {"max_num_seqs": sequences, "engine_args": {"compilation_config": graphs}}
        if mixes(case):  # nor does it measure memory
            options["kv_cache_gib"] = 4.0
            options["engine_args"]["max_num_batched_tokens"] = 4096
        engine = {"class_path": "VLLMEngine", "init_args": options}
    if case.get("apart"):
        options = {"engine": engine, "transfer": args.transfer[0]}
        if not args.tiny:
            options["engine"]["init_args"] |= {"gpu_memory_utilization": 0.8, "max_lora_rank": 0}
        engine = {"class_path": "RemoteEngine", "init_args": options}
    if denoises(case):
        engine = {"class_path": "DiffusionEngine", "init_args": {"block": 8 if args.tiny else 32}}
    plugins = [{"class_path": "NVFP4LoRA", "init_args": {"autocast": "bf16"}}] if case.get("format") else None
    if mixes(case):
        packed = case["arm"] if case["arm"] in PACKED else "nvfp4"
        plugins = [{"class_path": "NVFP4LoRA", "init_args": {"format": packed, "autocast": "bf16"}}]
    if case["arm"] in PLUGINS:
        plugins = [PLUGINS[case["arm"]]]
    policy = {
        "model": str(model),
        "tokenizer": str(model / "tokenizer"),
        "dtype": "fp32" if case.get("parts") else "bf16",
        **({"gradient_checkpointing": True} if case.get("parts") else {}),
        **({"lora": case["lora"]} if "lora" in case else {}),
        **({"random_weights": True} if case.get("drawn") else {}),
    }
    task = {"path": str(data), "evaluation_size": 8, "chat": False, "rewards": [{"class_path": "even_words.EvenWords"}]}
    parts = case.get("parts") and (args.devices > 1 or not args.tiny)
    trainer = {"default_root_dir": str(run), "max_epochs": args.iterations, "limit_val_batches": 0, "devices": 1}
    if parts:
        trainer |= {"devices": args.devices, "strategy": {"class_path": "ShardedStrategy"}}
        trainer |= {"accelerator": "cpu"} if args.tiny else {}
    if plugins:
        trainer["plugins"] = plugins
    elif not parts:
        trainer["precision"] = "bf16-true"
    if mixes(case):
        trainer["callbacks"] = [{"class_path": "RouterReplay"}] if case["replay"] == "on" else []
    elif not case.get("format"):
        trainer["callbacks"] = [{"class_path": "AIS"} if denoises(case) else TIS]
    if case.get("apart") and len(args.transfer) > 1:
        turns = {"class_path": "ways.TakeTurns", "init_args": {"ways": args.transfer, "each": args.turn}}
        trainer["callbacks"] = [*trainer.get("callbacks", []), turns]
    if args.then:
        later = {"class_path": "ways.ThenFormat", "init_args": {"format": args.then, "after": args.turn}}
        trainer["callbacks"] = [*trainer.get("callbacks", []), later]
    publisher = {"lora": "adapter" if "lora" in case and not (args.tiny or case.get("apart")) else "auto"}
    if denoises(case):
        publisher = {"format": "fp8_tensor"}
    elif case["arm"] == "fp8_row" or parts:  # fp32 masters say nothing of the sampler
        publisher["format"] = "fp8_row" if case["arm"] == "fp8_row" else "bf16"
    return {
        "seed_everything": 0,
        "model": {
            "policy": {"class_path": "DiffusionPolicy" if denoises(case) else "CausalPolicy", "init_args": policy},
            "optimizer": {"class_path": case.get("optimizer", "torch.optim.AdamW"), "init_args": {"lr": 1e-6}},
        },
        "data": {
            "task": {"class_path": "DatasetTask", "init_args": task},
            "engine": engine,
            "schedule": case.get("schedule", "on_policy"),
            "prompts_per_iteration": case["prompts"],
            "group_size": 8,
            "micro_batches": case["micro_batches"],
            "max_prompt_tokens": prompt + 8,
            "max_completion_tokens": case["completion"],
        },
        "publisher": publisher,
        "checkpoint": {"every_n_iterations": {"none": 0, "auto": "auto", "every": 1}[checkpoints]},
        "trainer": trainer,
    }


def stamped(lines: IO[str], log: Path) -> None:
    """Write what a run says into its log, each line with the seconds since its start."""
    begun = time.monotonic()
    with log.open("w") as file:
        for line in lines:
            if len(line) < 2000:  # a kernel's code is of no use here
                file.write(f"{time.monotonic() - begun:6.1f} {line}")
                file.flush()


def meeting(args: argparse.Namespace, case: dict[str, Any]) -> list[dict[str, str]]:
    """Return what the environment of each process of a run has: those of several start together, not one by one."""
    if args.devices == 1 or not case.get("parts"):
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "NODE_RANK": "0"}
    return [{**place, "LOCAL_RANK": str(rank)} for rank in range(args.devices)]


def watch(
    process: subprocess.Popen, metrics: Path, deadline: float, wanted: int
) -> tuple[list[float], float | None, float]:
    """Return when each row of an iteration appeared, the device's peak in GiB, and the deadline.

    It waits for the end of the process, or for so many rows.
    """
    ends: list[float] = []
    peak, asked, begun = 0.0, 0.0, time.monotonic()
    while process.poll() is None and time.monotonic() < deadline and len(ends) < wanted:
        if metrics.exists():
            rows = read_rows(metrics)
            for row in rows[len(ends) :]:  # as they come, so that a run that is cut short shows them
                ends.append(time.monotonic())
                shown = {name.removeprefix("time/"): round(value, 3) for name, value in row.items() if told(name)}
                print(f"{ends[-1] - begun:6.1f} row {len(ends)}, {peak:.1f} GiB: {json.dumps(shown)}", flush=True)
        if time.monotonic() - asked > 1.0:
            peak, asked = max(peak, device_memory()), time.monotonic()
        time.sleep(0.02)
    if process.poll() is None and len(ends) < wanted:  # what it hangs in stands at the end of its log then
        process.send_signal(signal.SIGABRT)
        time.sleep(3.0)
    process.kill()
    process.wait()
    return ends, round(peak, 1) or None, deadline


def told(name: str) -> bool:
    """Return whether a column of a row is shown when it comes."""
    return name.startswith("time/") or name in ("rollout/seconds_ahead", "update/micro_batches", "mismatch/kl_k3")


def read_rows(metrics: Path) -> list[dict[str, float]]:
    """Return the rows of finished iterations."""
    if not metrics.exists():
        return []
    with metrics.open() as file:
        found = [row for row in csv.DictReader(file) if row.get("time/iteration")]
    kept = ("time/", "mismatch/", "rollout/seconds_ahead", "publish/gigabytes_per_second", "publish/bytes", "update/m")
    return [{key: float(value) for key, value in row.items() if key.startswith(kept) and value} for row in found]


def device_memory() -> float:
    """Return what the driver says is used on the fullest GPU that this process sees, in GiB; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", seen]
    try:
        return max(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())) / 1024
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return 0.0


def table(results: list[dict[str, Any]]) -> None:
    """Print one line a run."""
    columns = ("wall", "mean_wall", "phases_sum", *PHASES, "checkpoint_gib", "peak_gib")
    what = ("case", "arm", "peer", "checkpoints", "schedule", "replay")
    print(" | ".join([*what, *columns]))
    for result in results:
        cells = [str(result.get(column, "")) for column in columns]
        print(" | ".join([*(str(result.get(name, "")) for name in what), *cells, result.get("error", "")]))


if __name__ == "__main__":
    main()
