"""Whole runs of `lit-qrl fit`, timed from outside: wall clock between rows of metrics.csv, peak memory of the device.

    python benchmarks/iteration.py --cases full-1.5b lora-7b qerl-32b --checkpoints none auto --out out.json

Each run is the command that a user would type, in a process of its own; this one reads `metrics.csv` every 20 ms and
asks the driver for the memory in use; each row is printed as it comes. Models have Qwen2.5's shapes and random weights,
written to a folder first, so that loading, checkpoints and resuming are a user's too; those of several GPUs, and
full-7b's, are drawn by the run itself, which starts sooner. Iterations before the third do not count; figures are
medians. Where a run is cut, by `--timeout` or by SIGTERM to this process, the rows that it wrote count (`counted` says
how many), and the table comes.

full-1.5b, full-3b  full fine-tuning in bf16 over fp32 masters, or without them (`--masters bf16`), TIS
short-1.5b, uneven-1.5b  the same with 64 tokens; with up to 2048, where one token in 500 ends a completion
full-7b    the same with AdamW of 8 bits
lora-7b    LoRA of rank 32 on all linear layers in bf16, TIS
lora-1.5b  the same
qerl-32b   NVFP4 base from a quantized folder under a LoRA of rank 32
parts-3b, parts-8b  full fine-tuning with fp32 masters in parts (`ShardedStrategy`) on `--devices` GPUs, a vLLM on each
apart-8b   lora-7b at 8B, the adapter merged into each publish, vLLM in a process of its own on another GPU
llada-8b   masked diffusion of LLaDA-8B's shape, 16 completions: LoRA of rank 128, FP8 sampler, AIS
moe-30b    Qwen3-30B-A3B's shape, drawn at random and packed layer by layer: attention and experts in 4 bits (`--arms
           nvfp4`, `int4_group`) under a LoRA of rank 32 on attention, with routing replay or without (`--replay`);
           the first run on a host compiles Marlin's kernels for a minute, unless CUDA_CACHE_PATH has them

    python benchmarks/iteration.py --cases full-3b --arms bf16 fp8_row UnifiedFP8 QATAligned --checkpoints none
    python benchmarks/iteration.py --cases lora-7b --arms bf16 fp8_row PackedLoRA-fp8_row --checkpoints none
    exact="--set --data.engine.init_args.batch_invariant true"
    python benchmarks/iteration.py --cases full-1.5b --arms bf16 QATAligned-int4_group --checkpoints none $exact
    python benchmarks/iteration.py --cases parts-8b --devices 2 --checkpoints none
    python benchmarks/iteration.py --cases apart-8b --arms fp8_row --schedules on_policy one_step_off --checkpoints none
    python benchmarks/iteration.py --cases apart-8b --transfer ipc nccl --iterations 6 --checkpoints none
    python benchmarks/iteration.py --cases parts-8b --devices 2 --arms fp8_row --then bf16 --turn 4 --checkpoints none
    python benchmarks/iteration.py --cases full-1.5b --peers here trl trl here --checkpoints none
    python benchmarks/iteration.py --cases full-1.5b --recompute auto all --checkpoints none
    python benchmarks/iteration.py --cases moe-30b --arms nvfp4 --replay on off --checkpoints none
    python benchmarks/iteration.py --cases full-1.5b --learner ours liger compiled plain --checkpoints none
    python benchmarks/iteration.py --cases full-1.5b --without none norm gated turned none --checkpoints none

`--without` says what a kernel of ours is worth: the run does without it (the environment variable LIT_QRL_WITHOUT),
and the last table has the share of an iteration that it saves. `--learner` is what fuses the bf16 learner: our layers,
Liger's, torch's compiler, or nothing. `--arms`: what the sampler is published in, or a precision plugin. `--peers trl`
runs `trl_iteration.py`, the same iteration with TRL's trainer and its vLLM in the same process; under `--masters fp32`
its weights are fp32 and its products bf16, as by default, under `bf16` both are bf16. `--tiny` tries every line on a
CPU. Both orders at
once on two equal GPUs, the folder of the model written before:

    both="python benchmarks/iteration.py --cases full-1.5b --checkpoints none --models models"
    $both --prepare
    CUDA_VISIBLE_DEVICES=0 $both --peers here trl --out a.json &
    CUDA_VISIBLE_DEVICES=1 $both --peers trl here --out b.json
    python benchmarks/iteration.py --join a.json b.json
"""

import argparse
import contextlib
import csv
import fcntl
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
SHAPES["0.5b"] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
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
    "lora-1.5b": {"shape": "1.5b", "prompts": 16, "completion": 512, "micro_batches": 8, "lora": LORA},
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
        f"QATAligned-{format}": {"class_path": "QATAligned", "init_args": {"weights": format}}
        for format in ("fp8_block", "int4_group")
    },
    **{
        f"PackedLoRA-{format}": {"class_path": "PackedLoRA", "init_args": {"format": format}}
        for format in ("fp8_row", "fp8_block", "int4_group")
    },
}
ARMS = ("bf16", "fp8_row", *PLUGINS, "nvfp4", "int4_group")
PACKED = ("nvfp4", "int4_group")
"""What a base that is drawn at random is packed in."""
LEARNERS: dict[str, dict[str, Any]] = {
    "ours": {},
    "liger": {"class_path": "liger_policy.LigerPolicy"},
    "compiled": {"class_path": "liger_policy.CompiledPolicy"},
    "plain": {"init_args": {"fuse": False}},
}
RECOMPUTED = {"auto": "auto", "all": True, "none": False}
WARM_UP = 2
PHASES = ("publish", "rollout", "wait", "score", "update", "evaluate", "checkpoint", "other")
PEAK_RATE = 989e12
"""Operations a second of an H200 or H100 in bf16."""
SHOWN = (
    "rollout/seconds_ahead",
    "update/micro_batches",
    "update/recomputed_layers",
    "mismatch/kl_k3",
    "publish/merge_lost",
)
"""Columns of a row that are shown when it comes, beside the phases' seconds."""
ENDED: list[int] = []
"""The signal by which somebody asked this process to end."""


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--checkpoints", nargs="+", choices=("none", "auto", "every"), default=["none", "auto"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["bf16"], help="of cases without a quantized base")
    parser.add_argument("--replay", nargs="+", choices=("on", "off"), default=["on"], help="of routes, in mixtures")
    parser.add_argument("--learner", nargs="+", choices=LEARNERS, default=["ours"], help="what fuses its operations")
    parser.add_argument("--without", nargs="+", default=["none"], metavar="KERNEL", help="names joined by commas")
    parser.add_argument(
        "--recompute", nargs="+", choices=RECOMPUTED, default=["auto"], help="layers, in backward passes"
    )
    parser.add_argument("--masters", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="of trained weights")
    peers = [peer + masters for peer in ("here", "trl") for masters in ("", "/fp32", "/bf16")]
    parser.add_argument("--peers", nargs="+", choices=peers, default=["here"], help="one run each, in order")
    parser.add_argument("--ahead", action="store_true", help="let the next run import beside the one that is measured")
    parser.add_argument(
        "--then-all", type=int, default=0, metavar="N", help="N + 1 more iterations of the last run, all computed again"
    )
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
    parser.add_argument("--drawn", action="store_true", help="draw weights in the run itself: no folder is written")
    parser.add_argument("--micro_batches", type=int, help="of a step, on both sides (default: the case's)")
    parser.add_argument("--memory", action="store_true", help="print what torch and the driver hold after each phase")
    parser.add_argument("--to_the_end", action="store_true", help="time each run's end too, from its last row on")
    parser.add_argument("--stacks", action="store_true", help="write every second what the run's processes are in")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of the cases in parts")
    parser.add_argument("--iterations", type=int, default=7, help="of each run, the first two of which do not count")
    parser.add_argument("--completion", type=int, help="tokens of a completion (default: the case's)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--models", type=Path, help="where model folders are kept (default: nowhere)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for each run")
    parser.add_argument(
        "--prepare", action="store_true", help="write the folders of --models, and a YAML of each case, and end"
    )
    parser.add_argument("--join", nargs="+", type=Path, help="print the table of such files and end")
    parser.add_argument(
        "--set", nargs=argparse.REMAINDER, default=[], help="last: further options of fit, such as --a.b c"
    )
    parser.add_argument("--tiny", action="store_true", help="toy shapes and lengths, on a CPU")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


def main() -> None:
    """Run every case and print one table."""
    args = parse()
    if args.join:
        table([result for file in args.join if file.exists() for result in json.loads(file.read_text())])
        return
    signal.signal(signal.SIGTERM, lambda number, frame: ENDED.append(number))  # the run ends, and its rows count
    results: list[dict[str, Any]] = []
    try:
        measure_all(args, results)
    finally:  # also of what was measured before something failed
        table(results)
    if ENDED:
        sys.exit(128 + ENDED[0])


def measure_all(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Run every case; what was found is added to `results` and written as it comes."""
    import yaml

    with tempfile.TemporaryDirectory() as temporary:
        models = args.models.resolve() if args.models else Path(temporary)
        planned: list[Planned] = []
        for name in args.cases:
            case = dict(CASES[name])
            if args.tiny:
                shape = "tiny-denoiser" if denoises(case) else "tiny-mixture" if mixes(case) else "tiny"
                case |= {"shape": shape, "prompts": 4, "completion": 8, "micro_batches": 2}
            case["completion"] = args.completion or case["completion"]
            case["prompts"] = args.prompts or case["prompts"]
            case["micro_batches"] = args.micro_batches or case["micro_batches"]
            drawn = case["drawn"] = bool(args.drawn or case.get("drawn"))
            folder = model_folder(models, case["shape"], case.get("format"), case.get("stops", 1), drawn)
            if args.prepare:
                begins = {
                    "arm": args.arms[0],
                    "masters": args.masters[0],
                    "recompute": args.recompute[0],
                    "replay": "on",
                    "learner": args.learner[0],
                }
                made = configuration(args, case | begins, folder, models / name, args.checkpoints[0])
                (models / f"{name}.yaml").write_text(yaml.safe_dump(made))
                continue
            schedules = args.schedules if case.get("apart") else ["on_policy"]
            replay = args.replay if mixes(case) else ["off"]
            ways = args.checkpoints, args.arms, args.masters, args.recompute, args.peers, schedules, replay
            for number, (checkpoints, arm, masters, recompute, peer, schedule, routes, learner, without) in enumerate(
                itertools.product(*ways, args.learner, args.without)
            ):
                peer, _, other = peer.partition("/")
                masters = other or masters
                if peer == "trl" and recompute == "all" and "auto" in args.recompute:
                    continue  # which are the same there
                run = Path(temporary) / f"{name}-{number}"
                case |= {"arm": arm, "peer": peer, "schedule": schedule, "replay": routes, "recompute": recompute}
                case |= {"masters": masters, "learner": learner, "without": without}
                what = {"case": name, "arm": arm, "peer": peer, "checkpoints": checkpoints, "masters": masters}
                what |= {"recompute": recompute} if recompute != "auto" else {}
                what |= {"learner": learner} if learner != "ours" else {}
                what |= {"without": without} if len(args.without) > 1 else {}
                what |= {"schedule": schedule} if case.get("apart") else {}
                what |= {"replay": routes} if mixes(case) else {}
                planned.append(Planned(what, dict(case), folder, run, checkpoints))
        if planned and args.then_all:
            planned[-1].case["then_all"] = args.then_all
        following: Started | None = None
        for number, plan in enumerate(planned):
            if ENDED:
                break
            started, following = following or begin(args, plan), None
            started.gate.touch()
            if args.ahead and number + 1 < len(planned):
                following = begin(args, planned[number + 1])
            try:
                result = {**plan.what, **measure(args, plan, started)}
            except BaseException:
                end(following)
                raise
            print(json.dumps(result), flush=True)
            results.append(result)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))
        end(following)


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
    drawn has no weights. Of several processes that want it one makes it.
    """
    name = "-".join(filter(None, (shape, format, f"{stops}-stops" if stops > 1 else None, "drawn" if drawn else None)))
    models.mkdir(parents=True, exist_ok=True)
    with (models / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (models / f"{name}.whole").exists():
            write_folder(models / name, shape, format, stops, drawn)
            (models / f"{name}.whole").touch()
    return models / name


def write_folder(folder: Path, shape: str, format: str | None, stops: int, drawn: bool) -> None:
    """Write the folder of a model, as `model_folder` says."""
    folder.mkdir(parents=True, exist_ok=True)
    case = {"shape": shape}
    if drawn:
        write_outline(shape, folder, stops)
        return
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
    shutil.copytree(folder / "tokenizer", folder, dirs_exist_ok=True)  # where TRL's vLLM looks for it
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
    shutil.copytree(folder / "tokenizer", folder, dirs_exist_ok=True)


# ----------------------------------------------------------------------------------------------------------------- run


@dataclass
class Planned:
    """A run: what the table calls it, its case, the folders of model and run, and what it saves."""

    what: dict[str, Any]
    case: dict[str, Any]
    model: Path
    run: Path
    checkpoints: str


@dataclass
class Started:
    """The processes of a run, where they write, and the file for which they wait after their imports."""

    processes: list[subprocess.Popen]
    log: Path
    writer: threading.Thread
    gate: Path


def begin(args: argparse.Namespace, plan: Planned) -> Started:
    """Start the processes of a run."""
    import yaml

    run, case = plan.run, plan.case
    run.parent.mkdir(parents=True, exist_ok=True)
    config, gate = run.with_name(run.name + ".yaml"), run.with_name(run.name + ".gate")
    config.write_text(yaml.safe_dump(configuration(args, case, plan.model, run, plan.checkpoints)))
    log = run.with_name(run.name + ".log")
    if args.out:  # beside the figures: the run's folder goes with this process
        args.out.parent.mkdir(parents=True, exist_ok=True)
        log = args.out.with_name(f"{args.out.stem}-{run.name}.log")
    here = [str(Path(__file__).with_name("gate.py"))] if args.ahead else ["-m", "lit_qrl.cli"]
    if args.stacks:
        here = [str(Path(__file__).with_name("sampled.py")), str(log.with_suffix(".stacks"))]
    command = [sys.executable, *here, "fit", "--config", str(config), *args.set]
    if case["peer"] == "trl":
        command = [sys.executable, str(Path(__file__).with_name("trl_iteration.py")), str(config), str(run)]
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT), *sys.path[1:]])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    environment |= {"RUN_GATE": str(gate)} if args.ahead else {}
    environment |= {"LIT_QRL_WITHOUT": case["without"]} if case["without"] != "none" else {}
    read, write = os.pipe()
    writer = threading.Thread(target=stamped, args=(os.fdopen(read, errors="replace"), log), daemon=True)
    writer.start()
    options = {"stdout": write, "stderr": write, "cwd": run.parent, "start_new_session": True}
    processes = [subprocess.Popen(command, env=environment | joins, **options) for joins in meeting(args, case)]
    os.close(write)
    return Started(processes, log, writer, gate)


def end(started: Started | None) -> None:
    """End what belongs to a run, engines of their own, too."""
    for one in started.processes if started else []:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
    if started:
        started.writer.join(5)


def measure(args: argparse.Namespace, plan: Planned, started: Started) -> dict[str, Any]:
    """Return the figures of a run whose gate is open, or what went wrong."""
    case, run, checkpoints, processes = plan.case, plan.run, plan.checkpoints, started.processes
    before, deadline = device_memory(), time.monotonic() + args.timeout
    begun = time.monotonic()
    whole = checkpoints != "none" or args.to_the_end  # else what follows the last row is of no interest
    wanted = iterations(args, case) if not whole else sys.maxsize
    try:
        ends, peaks = watch(processes[0], run / "metrics.csv", deadline, wanted)
        ended = time.monotonic()
    finally:
        end(started)
    rows = read_rows(run / "metrics.csv")[: len(ends)]
    result: dict[str, Any] = {
        "peak_gib": round(max(peaks), 1) or None,
        "held_before_gib": round(before, 1),
        "peaks": [round(peak, 1) for peak in peaks],
        **start(begun, ends, rows),
        "seconds_in_all": round(time.monotonic() - begun, 1),
    }
    if whole and ends:
        result["end"] = round(ended - ends[-1], 1)
    if len(rows) < wanted and (processes[0].returncode or not whole):
        result |= {"error": f"status {processes[0].returncode} after {len(rows)} rows"}
        result |= {"seen": rows, "log": started.log.read_text()[-8000:]}
    if (held := run / "held.jsonl").exists():
        print(held.read_text(), flush=True)
        result["held"] = [json.loads(line) for line in held.read_text().splitlines()]
    saved = run / "checkpoints" / "last.ckpt"
    result["checkpoint_gib"] = round(saved.stat().st_size / 2**30, 2) if saved.exists() else None
    wall = [later - earlier for earlier, later in itertools.pairwise(ends)]
    usual = args.iterations if "then_all" in case else len(rows)
    if wall:
        result |= figures(rows[:usual], wall[: usual - 1]) | rates(case, args, rows[:usual])
    if rows[usual + 1 :]:  # of what follows the first is left out
        again = rows[usual - 1 :]
        result["all_again"] = figures(again, wall[usual - 1 :]) | rates(case, args, again)
        result["all_again"]["peak_gib"] = round(max(peaks[usual + 1 :]), 1)
        result["peak_gib"] = round(max(peaks[: usual + 1]), 1)
    return result


def iterations(args: argparse.Namespace, case: dict[str, Any]) -> int:
    """Return how many iterations a run has."""
    return args.iterations + (1 + case["then_all"] if "then_all" in case else 0)


def figures(rows: list[dict[str, float]], wall: Sequence[float]) -> dict[str, Any]:
    """Return the medians of a run's iterations, without those that warm up where there are others.

    Args:
        rows: of the run's `metrics.csv`.
        wall: seconds between their ends, one fewer.
    """
    skipped = min(WARM_UP, len(rows) - 1)
    counted, between = rows[skipped:], wall[skipped - 1 :]

    def median(name: str) -> float:
        return round(statistics.median(row.get(name, 0.0) for row in counted), 3)

    without = [row["time/iteration"] - row.get("time/checkpoint", 0.0) - row.get("time/other", 0.0) for row in counted]
    return {
        "wall": round(statistics.median(between), 3),
        "mean_wall": round(statistics.mean(between), 3),
        "counted": len(counted),
        "phases_sum": round(statistics.median(without), 3),
        "row_iteration": median("time/iteration"),
        **mismatch(rows),
        "walls": [round(one, 2) for one in wall],
        "checkpoint_seconds": [round(row.get("time/checkpoint", 0.0), 2) for row in rows],
        "rows": [{name: round(value, 3) for name, value in row.items() if told(name)} for row in rows],
        "drawn_ahead_in": median("rollout/seconds_ahead"),
        "publish_parts": publish_parts(counted),
        "first_publish_parts": publish_parts(rows[:1]),
        "micro_batches": rows[-1].get("update/micro_batches"),
        "recomputed_layers": median("update/recomputed_layers"),
        "shared_prompt_tokens": rows[-1].get("routing/shared_prompt_tokens"),
        "publish_gigabytes": round(rows[-1].get("publish/bytes", 0.0) / 1e9, 3),
        **{phase: median(f"time/{phase}") for phase in PHASES},
    }


def rates(case: dict[str, Any], args: argparse.Namespace, rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the tokens of an iteration and the shares of the GPU's bf16 rate at which they were scored and trained.

    Of a parameter and token an update takes 6 operations, 4 where only adapters are trained, and scoring 2; what is
    computed again does not count. A group's prompt counts once.
    """
    shape, counted = SHAPES[case["shape"]], rows[min(WARM_UP, len(rows) - 1) :]
    lengths = [row["rollout/length"] for row in counted if "rollout/length" in row]
    if not lengths or mixes(case) or denoises(case):
        return {}
    tokens = case["prompts"] * ((12 if args.tiny else args.prompt) + 8 * statistics.mean(lengths))
    operations = parameters(shape) * tokens / PEAK_RATE / (args.devices if case.get("parts") else 1)
    rates = {"tokens": round(tokens)}
    for phase, each in (("score", 2), ("update", 4 if "lora" in case else 6)):
        seconds = statistics.median(row.get(f"time/{phase}", 0.0) for row in counted)
        rates |= {f"{phase}_rate": round(each * operations / seconds, 3)} if seconds > 0.05 else {}
    return rates


def parameters(shape: dict[str, Any]) -> int:
    """Return how many numbers of a dense model each token is multiplied with: layers' matrices and the output head."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    held = shape["num_key_value_heads"] * (width // heads)
    each = 2 * width * width + 2 * width * held + 3 * width * shape["intermediate_size"]
    return shape["num_hidden_layers"] * each + shape["vocab_size"] * width


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


def beside(case: dict[str, Any]) -> bool:
    """Return whether an adapter is published beside its base, as by default where that is packed, or merged into it."""
    return "lora" in case and bool(case.get("format") or mixes(case) or case["arm"].startswith("PackedLoRA"))


def configuration(
    args: argparse.Namespace, case: dict[str, Any], model: Path, run: Path, checkpoints: str
) -> dict[str, Any]:
    """Return the YAML of a run."""
    import random

    prompt = 12 if args.tiny else args.prompt
    draw = random.Random(0)
    data = run.with_name(run.name + ".jsonl")
    vocabulary = SHAPES[case["shape"]]["vocab_size"]
    rows = ({"question": " ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(prompt))} for _ in range(256))
    data.write_text("".join(json.dumps({**row, "answer": "1"}) + "\n" for row in rows))
    engine = {"class_path": "TransformersEngine"}
    if not args.tiny:
        share = {"32b": 0.5, "8b": 0.25, "30b-a3b": 0.25}.get(case["shape"], 0.3)  # 0.3 is TRL's default
        options = {"gpu_memory_utilization": share, "quick_start": True, "max_lora_rank": 32 if beside(case) else 0}
        if case.get("parts") or case.get("apart") or mixes(case):  # a start records no more graphs than it needs
            sequences = case["prompts"] * 8 // (args.devices if case.get("parts") else 1)
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, sequences]}
            options |= {"max_num_seqs": sequences, "engine_args": {"compilation_config": graphs}}
        if mixes(case):  # nor does it measure memory
            options["kv_cache_gib"] = 4.0
            options["engine_args"]["max_num_batched_tokens"] = 4096
        engine = {"class_path": "VLLMEngine", "init_args": options}
    if case.get("apart"):
        options = {**engine.get("init_args", {}), "transfer": args.transfer[0]}
        options |= {} if args.tiny else {"gpu_memory_utilization": 0.8}
        engine = {"class_path": "RemoteVLLMEngine", "init_args": options}
    if denoises(case):
        engine = {"class_path": "DiffusionEngine", "init_args": {"block": 8 if args.tiny else 32}}
    plugins = [{"class_path": "NVFP4LoRA"}] if case.get("format") else None
    if mixes(case):
        packed = case["arm"] if case["arm"] in PACKED else "nvfp4"
        plugins = [{"class_path": "NVFP4LoRA", "init_args": {"format": packed}}]
    if case["arm"] in PLUGINS:
        plugins = [PLUGINS[case["arm"]]]
    learner = LEARNERS[case["learner"]]
    policy = {
        "model": str(model),
        "tokenizer": str(model / "tokenizer"),
        "dtype": "fp32" if case.get("parts") else "bf16",
        **({"gradient_checkpointing": True} if case.get("parts") else {}),
        **({"gradient_checkpointing": RECOMPUTED[case["recompute"]]} if case["recompute"] != "auto" else {}),
        **({"lora": case["lora"]} if "lora" in case else {}),
        **({"random_weights": True} if case.get("drawn") else {}),
    }
    task = {"path": str(data), "evaluation_size": 8, "chat": False, "rewards": [{"class_path": "even_words.EvenWords"}]}
    parts = case.get("parts") and (args.devices > 1 or not args.tiny)
    trainer = {"default_root_dir": str(run), "max_epochs": iterations(args, case), "limit_val_batches": 0, "devices": 1}
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
    if args.memory:
        trainer["callbacks"] = [*trainer.get("callbacks", []), {"class_path": "held.Held"}]
    if args.then:
        later = {"class_path": "ways.ThenFormat", "init_args": {"format": args.then, "after": args.turn}}
        trainer["callbacks"] = [*trainer.get("callbacks", []), later]
    if "then_all" in case:
        trainer["callbacks"] += [
            {"class_path": "recompute_from.RecomputeFrom", "init_args": {"iteration": args.iterations}}
        ]
    publisher = {"lora": "auto"}
    if denoises(case):
        publisher = {"format": "fp8_tensor"}
    elif case["arm"] == "fp8_row" or parts:  # fp32 masters say nothing of the sampler
        publisher["format"] = "fp8_row" if case["arm"] == "fp8_row" else "bf16"
    return {
        "seed_everything": 0,
        "model": {
            "policy": {
                "class_path": "DiffusionPolicy" if denoises(case) else learner.get("class_path", "CausalPolicy"),
                "init_args": policy | learner.get("init_args", {}),
            },
            "master_weights": case["masters"] == "fp32",
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


def watch(process: subprocess.Popen, metrics: Path, deadline: float, wanted: int) -> tuple[list[float], list[float]]:
    """Return when each row of an iteration appeared, and the most GiB in use on the device until each and the end.

    It waits for the end of the process, for so many rows, for the deadline, or for a signal to this process.
    """
    ends: list[float] = []
    peaks, asked, begun = [0.0], 0.0, time.monotonic()
    while process.poll() is None and time.monotonic() < deadline and len(ends) < wanted and not ENDED:
        rows = read_rows(metrics)
        for row in rows[len(ends) :]:  # as they come, so that a run that is cut short shows them
            peaks.append(0.0)
            ends.append(time.monotonic())
            shown = {name.removeprefix("time/"): round(value, 3) for name, value in row.items() if told(name)}
            print(f"{ends[-1] - begun:6.1f} row {len(ends)}, {max(peaks):.1f} GiB: {json.dumps(shown)}", flush=True)
        if time.monotonic() - asked > 0.5:
            peaks[-1], asked = max(peaks[-1], device_memory()), time.monotonic()
        time.sleep(0.02)
    if process.poll() is None and len(ends) < wanted and not ENDED:  # what it hangs in stands at the end of its log
        process.send_signal(signal.SIGABRT)
        time.sleep(3.0)
    process.kill()
    process.wait()
    return ends, peaks


def told(name: str) -> bool:
    """Return whether a column of a row is shown when it comes."""
    return name.startswith("time/") or name in SHOWN


def read_rows(metrics: Path) -> list[dict[str, float]]:
    """Return the rows of finished iterations."""
    if not metrics.exists():
        return []
    with metrics.open() as file:
        found = [row for row in csv.DictReader(file) if row.get("time/iteration")]
    kept = ("time/", "mismatch/", "rollout/seconds_ahead", "rollout/length", "publish/bytes", "update/m")
    kept += ("routing/shared_prompt_tokens", "update/recomputed_layers", "publish/merge_lost")
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
    """Print one line a run, and how many times as fast ours is as TRL's, of all runs of a case."""
    columns = ("wall", "mean_wall", "counted", *PHASES, "update_rate", "score_rate", "checkpoint_gib", "peak_gib")
    what = ("case", "arm", "masters", "peer", "checkpoints", "recompute", "learner", "without", "schedule", "replay")
    shown = [name for name in (*what, *columns) if any(result.get(name) for result in results)]
    print(" | ".join([*shown, "walls"]))
    for result in results:
        cells = [str(result.get(name, "")) for name in shown]
        print(" | ".join([*cells, " ".join(map(str, result.get("walls", []))), result.get("error", "")]))
        if again := result.get("all_again"):
            cells = [str(again.get(name, "the same, all again" if name == "case" else "")) for name in shown]
            print(" | ".join([*cells, " ".join(map(str, again["walls"]))]))
    for case in dict.fromkeys(result["case"] for result in results):
        for line in compared([result for result in results if result["case"] == case and "wall" in result]):
            print(f"{case}: {line}")


USUAL = {"recompute": "auto", "learner": "ours", "without": "none"}
"""The ways of a run that its name does not say."""


def named(way: Sequence[str]) -> str:
    """Return a run's arm and what of its ways is not usual.

    >>> named(["bf16", "auto", "liger", "none"])
    'bf16, learner liger'
    """
    told = (f"{name} {one}" for (name, usual), one in zip(USUAL.items(), way[1:], strict=True) if one != usual)
    return ", ".join((way[0], *told))


def compared(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what the iterations of one case say of TRL, or else of bf16, against each of our ways, over all their runs.

    Each is beside the runs with masters of the same kind.
    """
    ways: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        here = result["peer"] == "here"
        way = [result["arm"] if here else "trl", *(result.get(name, usual) for name, usual in USUAL.items())]
        ways.setdefault((result.get("masters", ""), *way), []).append(result)
    usual = tuple(USUAL.values())
    for (masters, *way), ours in ways.items():
        theirs = ways.get((masters, "trl", *usual)) or ways.get((masters, "trl", way[1], *usual[1:]))
        base = theirs or ways.get((masters, "bf16", *usual)) or ways.get((masters, way[0], *usual))
        if base is None or ours is base or way[0] == "trl":
            continue
        first, second = (
            statistics.median([wall for run in runs for wall in run["walls"][-run["counted"] :]])
            for runs in (base, ours)
        )
        memory = [max(run["peak_gib"] or 0.0 for run in runs) for runs in (base, ours)]
        yield (
            f"{masters} masters: {'TRL' if theirs else 'first'} {first:.2f} s, here {named(way)} {second:.2f} s: "
            f"{first / second:.3f} times as fast; peaks {memory[0]:.1f} and {memory[1]:.1f} GiB"
        )


if __name__ == "__main__":
    main()
