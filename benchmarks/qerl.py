"""Whole GRPO steps of QeRL on one GPU: seconds by phase and memory, by model size, format, batch and length.

    python benchmarks/qerl.py --sizes 32b --methods nvfp4 --batches 2 8 --completions 300 512 1024 2048 --out out.json

The project's own Trainer, module, data module, publisher and vLLM engine run; no part of a step is written anew
here. Models have Qwen2.5's shapes and random weights, drawn and packed layer by layer; completions run to a fixed
length. Each size × method × section has a process of its own. Sections:

steps     GRPO iterations, one update each: seconds by phase, peaks by phase, and in the same process `LLM.generate`
          on the same engine with the same adapter and log-prob settings, for the share of its speed and the bound
rollout   the engine alone with a LoRA of rank 32: for a base that no learner fits beside
ranks     the engine alone at batch 1 with LoRA of each rank

Methods: bf16 (plain LoRA, the baseline), nvfp4, mxfp4, int4_group. Memory is in GiB; "device" is what the driver
says is used, CUDA context and graphs included. Out of memory is a result: it is noted, and the next setting runs in a
new process. `--tiny` tries every line on a CPU.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker import measured, weight_bytes  # beside this script

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_BIG = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 512},
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "14b": _BIG | {"intermediate_size": 13824, "num_hidden_layers": 48},
    "32b": _BIG | {"intermediate_size": 27648, "num_hidden_layers": 64},
}
METHODS = ("bf16", "nvfp4", "mxfp4", "int4_group")
SECTIONS = ("steps", "rollout", "ranks")
CHECKPOINTING: dict[str, Any] = {"on": True, "off": False, "auto": "auto"}
"""What of the layers is computed again: all, none, or those that do not fit (alone: not beside the others)."""
GIB = 2**30
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# What the rollout of one iteration may take over raw generation, and the seconds for all else (the target of a step).
BOUND_FACTOR, BOUND_SECONDS = 1.25, 2.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["7b"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["nvfp4"])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=["steps"])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 8], help="sequences, one group")
    parser.add_argument("--completions", type=int, nargs="+", default=[300, 512, 1024, 2048])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--checkpointing", nargs="+", choices=CHECKPOINTING, default=["on"], help="of gradients")
    parser.add_argument("--also", nargs="+", default=[], metavar="BxN", help="further settings, such as 8x2048")
    parser.add_argument(
        "--off", nargs="+", default=[], metavar="BxN", help="also these settings without, such as 8x1024"
    )
    parser.add_argument("--iterations", type=int, default=2, help="measured ones of each setting")
    parser.add_argument("--long-iterations", type=int, default=1, help="the same for completions of 1024 and more")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64], help="of the section `ranks`")
    parser.add_argument("--micro-batch-tokens", type=int, default=8704, help="upper bound that sets the micro-batches")
    parser.add_argument(
        "--autocast", choices=("bf16", "none"), default="bf16", help="of the learner over its fp32 LoRA"
    )
    parser.add_argument("--share", action="store_true", help="the learner reads the engine's own base (share_weights)")
    parser.add_argument("--fuse", choices=("auto", "off"), default="auto", help="norms and activations in one kernel")
    parser.add_argument("--start", choices=("quick", "compile", "eager"), default="quick", help="how decoding is run")
    parser.add_argument("--utilization", type=float, default=0.6, help="share of the GPU that the engine asks for")
    parser.add_argument("--prefill-tokens", type=int, default=4096, help="tokens of a prefill batch of the engine")
    parser.add_argument(
        "--cap-gib", type=float, help="limit of the process's CUDA memory, such as 72 for an 80 GB card"
    )
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument(
        "--variants", action="store_true", help="of `rollout`: raw speed with and without adapter and log-probs too"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also print what an update, or of `rollout` decoding, spends its time on"
    )
    parser.add_argument("--expandable", action="store_true", help="let torch's allocator grow its segments")
    parser.add_argument("--no-raw", action="store_true", help="leave raw generation out")
    parser.add_argument("--tiny", action="store_true", help="toy shapes and lengths, on a CPU too")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for each process")
    parser.add_argument("--total", type=float, default=3000, help="seconds after which no process is started")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--worker", nargs=4, metavar=("SECTION", "SIZE", "METHOD", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.sizes, args.prompt, args.completions, args.rank = ["tiny"], 16, [8, 12], 8
        args.ranks, args.micro_batch_tokens = [8, 16], 64
        args.off = [f"{args.batches[-1]}x12"] if args.off else []
        args.also = [f"{args.batches[-1]}x16"] if args.also else []
    return args


# --------------------------------------------------------------------------------------------------------- the parent


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    started, results = time.perf_counter(), {}
    try:
        for section in args.sections:
            for size in args.sizes:
                for method in args.methods:
                    left = args.total - (time.perf_counter() - started)
                    if left < 30:
                        results[f"{section}/{size}/{method}"] = {"error": "not started: no time left"}
                        continue
                    results[f"{section}/{size}/{method}"] = measure(args, section, size, method, left)
                    write(args, results)
    finally:
        write(args, results)
        table(results)


def write(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if args.out:
        shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        args.out.write_text(json.dumps({"arguments": shown, "results": results}, indent=1))


def settings_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the settings of one process: the short first, without checkpointing last, since those may not fit."""
    found = [
        {"batch": batch, "completion": completion, "checkpointing": CHECKPOINTING[gc]}
        for gc in sorted(args.checkpointing, reverse=True)
        for completion in sorted(args.completions)
        for batch in args.batches
    ]
    for on, settings in ((True, args.also), (False, args.off)):
        for batch, completion in (map(int, setting.split("x")) for setting in settings):
            one = {"batch": batch, "completion": completion, "checkpointing": on}
            found += [] if one in found else [one]
    return found


def measure(args: argparse.Namespace, section: str, size: str, method: str, left: float) -> dict[str, Any]:
    """Return what processes of their own find; one that ran out of memory is followed by one for what is left."""
    if section == "ranks":
        waiting = [{"rank": rank, "batch": 1, "completion": args.completions[0]} for rank in args.ranks]
    else:
        waiting = settings_of(args)
    merged: dict[str, Any] = {"rows": []}
    deadline = time.perf_counter() + min(left, args.timeout)
    while waiting and deadline - time.perf_counter() > 20:
        figures = run_process([section, size, method], waiting, deadline - time.perf_counter())
        merged["rows"] += figures.pop("rows", [])
        if "error" in figures:
            figures["error"] = f"{figures['error']} at {figures.get('running')}"
        merged |= figures
        print(f"--- {section}/{size}/{method}: {json.dumps(figures)[:600]}", flush=True)
        if section == "ranks":
            done = [row["rank"] for row in merged["rows"]]
            left = [setting for setting in waiting if setting["rank"] not in done]
            # one that fails by itself is left out; the others follow in a new process
            waiting = left if len(left) < len(waiting) else left[1:]
            continue
        if not figures.get("out_of_memory"):
            break
        failed = figures.pop("out_of_memory")
        merged.pop("out_of_memory", None)
        dropped = [s for s in waiting if at_least(s, failed)]
        merged["rows"] += [s | {"oom": True, "tried": s == failed} for s in dropped]
        measured = [{key: row[key] for key in failed} for row in merged["rows"]]
        waiting = [s for s in waiting if s not in measured]
    return merged


def at_least(setting: dict[str, Any], failed: dict[str, Any]) -> bool:
    """Return whether a setting needs no less memory than one that did not fit."""
    larger = setting["batch"] >= failed["batch"] and setting["completion"] >= failed["completion"]
    return larger and (failed["checkpointing"] or not setting["checkpointing"])


def run_process(worker: list[str], settings: list[dict[str, Any]], timeout: float) -> dict[str, Any]:
    return measured(worker, timeout, ["--settings", json.dumps(settings)])


# --------------------------------------------------------------------------------------------------------- the worker


def work(args: argparse.Namespace) -> None:
    section, size, method, file = args.worker
    if args.expandable:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    figures: dict[str, Any] = {}

    def save() -> None:
        Path(file).write_text(json.dumps(figures))

    try:
        import torch

        if args.tiny and not torch.cuda.is_available():
            from tests import marlin_shim, vllm_cpu_shim

            (marlin_shim if args.share else vllm_cpu_shim).install()
        if args.cap_gib and torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(args.cap_gib * GIB / torch.cuda.mem_get_info()[1])
        run = Steps(args, size, method) if section == "steps" else Alone(args, size, method)
        run.measure(args.settings, figures, save)
    except Exception as error:
        first = next((e for e in chain(error) if "OutOfMemory" in type(e).__name__), None)
        if first is not None:
            figures["out_of_memory"] = figures.get("running", args.settings[0])
        else:
            traceback.print_exc()
            text = str(error).splitlines()
            figures["error"] = f"{type(error).__name__}: {text[0] if text else ''}"[:400]
    save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines leave threads behind that can keep the interpreter alive


def chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def config_of(args: argparse.Namespace, size: str) -> Any:
    from transformers import Qwen2Config

    longest = args.prompt + max(args.completions) + 8
    shape = {"tie_word_embeddings": False} | SHAPES[size]
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return Qwen2Config(**shape, **special, max_position_embeddings=max(4096, longest), dtype="bfloat16")


def lora_of(rank: int) -> Any:
    from peft import LoraConfig

    # factors that are not zero, so that receipts, probe and mismatch see the adapter
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=LAYERS, init_lora_weights=False)


def engine_of(args: argparse.Namespace, config: Any, rank: int, batch: int, completion: int, utilization: float) -> Any:
    from lit_qrl.rollout.vllm.engine import VLLMEngine

    head = config.hidden_size // config.num_attention_heads
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head
    needed = batch * (args.prompt + completion + 32) * per_token / GIB
    return VLLMEngine(
        max_lora_rank=rank,
        max_num_seqs=max(batch, 8),  # the probe scores eight at a time
        max_model_len=args.prompt + completion,
        kv_cache_gib=round(1.05 * needed + 0.1, 2),
        gpu_memory_utilization=utilization,
        enforce_eager=args.start == "eager",
        quick_start=args.start == "quick",
        engine_args={"max_num_batched_tokens": max(args.prefill_tokens, args.prompt + 1), **args.engine_args},
    )


def raw_seconds(
    llm: Any, prompt: list[int], batch: int, completion: int, adapter: bool, logprobs: bool = True
) -> float:
    """Return the seconds of `LLM.generate` for one group, with the log-probs that an engine reports."""
    import vllm
    from vllm.lora.request import LoRARequest

    from lit_qrl.rollout.vllm.adapter import ADAPTER_ID

    reported = {"logprobs": 0, "flat_logprobs": True} if logprobs else {}
    params = vllm.SamplingParams(
        n=1, max_tokens=completion, temperature=1.0, ignore_eos=True, detokenize=False, **reported
    )
    request = LoRARequest("policy", ADAPTER_ID, "in-memory") if adapter else None
    llm.reset_prefix_cache()
    synchronize()
    start = time.perf_counter()
    inputs: list[Any] = [{"prompt_token_ids": prompt} for _ in range(batch)]
    llm.generate(inputs, params, use_tqdm=False, lora_request=request)
    return time.perf_counter() - start


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory(reset: bool = True) -> dict[str, float]:
    """Return the peaks since the last reset: torch's, and what the driver says is used, as far as it can be known."""
    import torch

    if not torch.cuda.is_available():
        return {"torch": 0.0, "device": 0.0}
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    found = {"torch": torch.cuda.max_memory_allocated(), "device": torch.cuda.max_memory_reserved() + outside}
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return {name: round(value / GIB, 2) for name, value in found.items()}


def nbytes(tensors: Any) -> float:
    """Return the GiB of tensors, each storage once."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return round(sum(sizes.values()) / GIB, 3)


# ------------------------------------------------------------------------------------------------------- whole steps


class Steps:
    """One learner and one engine, through all settings in a single `fit`."""

    def __init__(self, args: argparse.Namespace, size: str, method: str) -> None:
        self.args, self.size, self.method = args, size, method
        self.config = config_of(args, size)

    def plans(self, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return one entry per iteration; the first warms up: kernels are compiled and memory is taken."""
        plans = [settings[0] | {"warm_up": True}]
        if self.args.profile:
            plans.append(max(settings, key=lambda s: (-s["completion"], s["batch"])) | {"profile": True})
        for setting in settings:
            long = setting["completion"] >= 1024
            plans += [setting] * (self.args.long_iterations if long else self.args.iterations)
        return plans

    def micro_batches(self, plan: dict[str, Any]) -> int:
        batch, tokens = plan["batch"], self.args.micro_batch_tokens
        fits = [k for k in range(1, batch + 1) if batch % k == 0]
        return next((k for k in fits if batch // k * plan["completion"] + self.args.prompt <= tokens), batch)

    def measure(self, settings: list[dict[str, Any]], figures: dict[str, Any], save: Any) -> None:
        import torch
        from lightning.pytorch import Trainer, seed_everything

        from lit_qrl.callbacks import Guard, MismatchMonitor, WeightPublisher
        from lit_qrl.data.module import RolloutDataModule
        from lit_qrl.module import GRPOModule
        from lit_qrl.objective import GRPO
        from lit_qrl.policy import CausalPolicy

        args, plans = self.args, self.plans(settings)
        seed_everything(0, verbose=False)
        torch.set_float32_matmul_precision("high")
        folder = Path(tempfile.mkdtemp(prefix="qerl-"))
        write_model(self.config, folder / "model")
        policy = CausalPolicy(
            str(folder / "model"),
            tokenizer=str(folder / "model" / "tokenizer"),  # beside the config its class would be Qwen2's
            dtype="bf16",
            lora=lora_of(args.rank),
            gradient_checkpointing="auto" if args.checkpointing == ["auto"] else True,
            random_weights=True,
            fuse="auto" if args.fuse == "auto" else False,
        )
        policy.stop_token_ids = ()  # every completion runs to its limit
        cuda = torch.cuda.is_available()
        module = GRPOModule(
            policy,
            objective=GRPO(scale="group", reduction="sequence", clip_low=0.2, clip_high=0.28),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, fused=cuda),
        )
        largest = {key: max(plan[key] for plan in plans) for key in ("batch", "completion")}
        first = plans[0]
        data = RolloutDataModule(
            words_task(args.prompt, self.config.vocab_size),
            self.engine(largest),
            prompts_per_iteration=1,
            group_size=first["batch"],
            micro_batches=self.micro_batches(first),
            max_prompt_tokens=args.prompt,
            max_completion_tokens=largest["completion"],
            seed=0,
        )
        clock = make_clock(self, plans, figures, save)
        trainer = Trainer(
            accelerator="gpu" if cuda else "cpu",
            devices=1,
            max_epochs=len(plans),
            callbacks=[
                clock,
                WeightPublisher(
                    format="bf16" if self.method == "bf16" else "auto",
                    lora="adapter",
                    # an engine that ran out of memory is a result
                    **({"max_restarts": 0} if "max_restarts" in signature(WeightPublisher).parameters else {}),
                ),
                MismatchMonitor(histograms_every=0),
                Guard(),
            ],
            accumulate_grad_batches=data.micro_batches,
            reload_dataloaders_every_n_epochs=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=str(folder / "run"),
            **self.precision(),
        )
        clock.arrange(data, trainer, first)
        trainer.fit(module, datamodule=data)

    def engine(self, largest: dict[str, int]) -> Any:
        args = self.args
        return engine_of(args, self.config, args.rank, largest["batch"], largest["completion"], args.utilization)

    def precision(self) -> dict[str, Any]:
        from lit_qrl.precision import NVFP4LoRA

        if self.method == "bf16":
            return {"precision": "bf16-mixed" if self.args.autocast == "bf16" else "32-true"}
        options = {"share_weights": True} if self.args.share else {}
        return {"plugins": [NVFP4LoRA(self.method, autocast=self.args.autocast, **options)]}


def make_clock(steps: Steps, plans: list[dict[str, Any]], figures: dict[str, Any], save: Any) -> Any:
    """Return the callback that takes the settings from iteration to iteration and writes down what each one took."""
    import torch

    from lit_qrl.callbacks import RLCallback
    from lit_qrl.network.memory import compute_again

    kept = ("generate", "reward", "rollout", "score", "update", "publish", "verify")

    class Clock(RLCallback):
        def __init__(self) -> None:
            self.born = self.left = time.perf_counter()
            self.peaks: dict[str, dict[str, float]] = {}
            figures.update(rows=[], share=bool(steps.args.share))

        def arrange(self, data: Any, trainer: Any, plan: dict[str, Any]) -> None:
            """Set what the next iteration reads; the limit also goes to an engine that was set up with another."""
            data.group_size, data.max_completion_tokens = plan["batch"], plan["completion"]
            data.micro_batches = trainer.accumulate_grad_batches = steps.micro_batches(plan)
            figures["running"] = {key: plan[key] for key in ("batch", "completion", "checkpointing")}
            save()

        def on_train_start(self, trainer: Any, module: Any) -> None:
            figures["configured"] = memory()
            figures["configure_seconds"] = round(time.perf_counter() - self.born, 1)
            network = module.policy.network
            tensors = [*network.parameters(), *network.buffers()]
            figures["learner_gib"] = nbytes(tensors)
            figures["adapter_gib"] = nbytes(p for p in network.parameters() if p.requires_grad)
            self.left = time.perf_counter()

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            # before the publisher's
            plan, network = plans[trainer.current_epoch], module.policy.network
            if trainer.current_epoch:
                engine = module.data.engine
                engine.spec = replace(engine.spec, sampling=module.data.sampling)
            if plan["checkpointing"] == "auto":
                pass  # the policy was made so
            elif plan["checkpointing"]:
                compute_again(network, True, on_cpu=False)
            else:
                network.gradient_checkpointing_disable()
            self.peaks = {"before": memory()}
            self.started = time.perf_counter()
            self.between = self.started - self.left

        def on_rollout_start(self, trainer: Any, module: Any, version: int) -> None:
            synchronize()

        def on_rollout_end(self, trainer: Any, module: Any, batch: Any) -> None:
            self.peaks["publish and rollout"] = memory()
            self.tokens = int(batch.mask.sum())
            self.prompt = batch.tokens[0, : int(batch.prompt_length[0])].tolist()
            if plans[trainer.current_epoch].get("profile"):
                self.profiler = torch.profiler.profile()
                self.profiler.start()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            synchronize()  # before the module closes the iteration's clock

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            synchronize()
            end = time.perf_counter()
            if plans[trainer.current_epoch].get("profile"):
                self.profiler.stop()
                figures["profile"] = top_kernels(self.profiler)
                print(json.dumps(figures["profile"], indent=1), flush=True)
            self.peaks["update"] = memory()
            plan = plans[trainer.current_epoch]
            row = {key: float(value) for key, value in module.iteration.row.items()}
            seconds = {name: round(row.get(f"time/{name}", 0.0), 3) for name in kept}
            found = {
                **plan,
                "micro_batches": module.data.micro_batches,
                "step_seconds": round(end - self.started + self.between, 3),
                "between": round(self.between, 3),
                "seconds": seconds,
                "tokens": self.tokens,
                "rollout_tokens_per_second": round(self.tokens / max(seconds["generate"], 1e-9), 1),
                "peaks": self.peaks,
                "mismatch": row.get("mismatch/abs_log_ratio"),
                "grad_norm": row.get("update/grad_norm"),
                "probe_mean": row.get("publish/probe_mean"),
                "publish_bytes": row.get("publish/bytes"),
            }
            engine = module.data.engine
            if hasattr(engine, "llm") and not steps.args.no_raw and not rehearses(plan):
                found["raw_seconds"] = self.raw(engine, plan)
            if not trainer.current_epoch and hasattr(engine, "live"):
                figures["engine_weights_gib"] = round(weight_bytes(engine.live.model) / GIB, 3)
                figures["engine_cache_gib"] = engine.kv_cache_gib
                parts = module.policy.network.modules()
                figures["borrowed_layers"] = sum(getattr(part, "stored", None) is not None for part in parts)
            figures["rows"].append(found)
            print(json.dumps(found), flush=True)
            if trainer.current_epoch + 1 < len(plans):
                self.arrange(module.data, trainer, plans[trainer.current_epoch + 1])
            else:
                figures.pop("running", None)
                figures["seconds_in_all"] = round(time.perf_counter() - self.born, 1)
                save()
            memory()
            self.left = time.perf_counter()

        def raw(self, engine: Any, plan: dict[str, Any]) -> float | None:
            """Measured once for each setting, after its last iteration, when everything is warm."""
            last = [i for i, p in enumerate(plans) if p == plan][-1]
            if sum(row.get("raw_seconds") is not None for row in figures["rows"] if same(row, plan)) or (
                last != len(figures["rows"])
            ):
                return None
            with torch.no_grad():
                return round(raw_seconds(engine.llm, self.prompt, plan["batch"], plan["completion"], True), 3)

    return Clock()


def rehearses(plan: dict[str, Any]) -> bool:
    """Return whether an iteration is not counted."""
    return bool(plan.get("warm_up") or plan.get("profile"))


def top_kernels(profiler: Any, count: int = 24) -> dict[str, Any]:
    """Return the milliseconds of the operations that took most of a profile, with their number of calls."""
    events = profiler.key_averages()
    total = lambda event: getattr(event, "self_device_time_total", 0) or event.self_cpu_time_total  # noqa: E731
    ranked = sorted(events, key=total, reverse=True)
    launches = sum(event.count for event in events if event.key.startswith(("cudaLaunch", "cuLaunch")))
    found: dict[str, Any] = {"launches": launches}
    return found | {event.key[:90]: [round(total(event) / 1e3, 2), event.count] for event in ranked[:count]}


def same(row: dict[str, Any], plan: dict[str, Any]) -> bool:
    return all(row.get(key) == plan[key] for key in ("batch", "completion", "checkpointing"))


def write_model(config: Any, folder: Path) -> None:
    """Write a config and a tokenizer of as many words, but no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if config.model_type == "qwen2":
        config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    # special tokens are found inside words too, so they share no prefix with one
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / "tokenizer"
    )


def words_task(prompt: int, vocabulary: int) -> Any:
    """Return a task of random prompts of one length; the reward is the share of even words."""
    import random

    from lit_qrl.data.task import Task
    from lit_qrl.rewards.base import Reward

    class EvenReward(Reward):
        name = "even"

        def __call__(self, samples: Any) -> list[float]:
            shares = []
            for sample in samples:
                words = sample.completion.split()
                shares.append(sum(word[-1] in "02468" for word in words) / max(len(words), 1))
            return shares

    class Words(Task):
        name, rewards = "words", [EvenReward()]

        def train_rows(self) -> Any:
            draw = random.Random(0)
            return [{"prompt": " ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(prompt))} for _ in range(64)]

        def evaluation_rows(self) -> Any:
            return self.train_rows()[:1]

        def prompt(self, row: Any) -> str:
            return row["prompt"]

        def reference(self, row: Any) -> None:
            return None

        def is_correct(self, samples: Any) -> list[bool]:
            return [False] * len(samples)

    return Words()


# ------------------------------------------------------------------------------------------------------ engine alone


class Alone:
    """An engine whose base is drawn and packed on its way in, with an adapter beside it."""

    def __init__(self, args: argparse.Namespace, size: str, method: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from lit_qrl import formats
        from lit_qrl.network.linears import quantizable_linears

        self.args, self.config = args, config_of(args, size)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.format = formats.get(method)
        with torch.device("meta"):
            self.network: Any = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        self.network.requires_grad_(False)  # nothing is trained here, so no gradients need room beside the engine
        self.shapes = {name: tuple(m.weight.shape) for name, m in quantizable_linears(self.network).items()}

    def measure(self, settings: list[dict[str, Any]], figures: dict[str, Any], save: Any) -> None:
        """Measure the settings, with one engine for each rank among them."""
        figures["rows"] = []
        for rank in dict.fromkeys(setting.get("rank", self.args.rank) for setting in settings):
            same_rank = [setting for setting in settings if setting.get("rank", self.args.rank) == rank]
            figures["running"] = same_rank[0]
            engine = self.start(same_rank, rank, figures)
            for setting in same_rank:
                figures["running"] = setting
                save()
                figures["rows"].append(setting | self.speeds(engine, setting, rank))
                print(json.dumps(figures["rows"][-1]), flush=True)
                save()
            if self.args.variants:
                figures["variants"] = self.variants(engine, same_rank)
            if self.args.profile:
                figures["profile"] = self.profile(engine, max(setting["batch"] for setting in same_rank))
            save()
            engine.close()
            del engine
        figures.pop("running")

    def start(self, settings: list[dict[str, Any]], rank: int, figures: dict[str, Any]) -> Any:
        """Return an engine with base and adapter."""
        from lit_qrl.network.stream import weight_stream
        from lit_qrl.rollout.engine import SamplerSpec
        from lit_qrl.types import SamplingParams

        args = self.args
        largest = {key: max(setting[key] for setting in settings) for key in ("batch", "completion")}
        engine = engine_of(args, self.config, rank, largest["batch"], largest["completion"], 0.9)
        lora = lora_of(rank)
        spec = SamplerSpec(
            sampling=SamplingParams(max_tokens=largest["completion"], ignore_stop=True),
            format=self.format,
            adapter=lora,
            prompt_limit=args.prompt,
        )
        start = time.perf_counter()
        engine.validate(spec)
        engine.setup(spec, SimpleNamespace(network=self.network, lora=lora))
        engine.load_weights(weight_stream(self.weights(), self.format, list(self.shapes)), self.format, 0)
        engine.load_adapter(self.adapter(rank), 0)
        figures["start_seconds"] = round(time.perf_counter() - start, 1)
        figures["engine_weights_gib"] = round(weight_bytes(engine.live.model) / GIB, 3)
        figures["engine_cache_gib"] = engine.kv_cache_gib
        return engine

    def variants(self, engine: Any, settings: list[dict[str, Any]]) -> dict[str, float]:
        """Return raw tokens/s with and without the adapter and the log-probs, so that both have a price."""
        import torch

        completion, generator, found = min(256, settings[0]["completion"]), torch.Generator().manual_seed(5), {}
        for batch in dict.fromkeys(setting["batch"] for setting in settings):
            for adapter in (True, False):
                for logprobs in (True, False):
                    (prompt,) = self.prompts(1, generator)
                    raw_seconds(engine.llm, prompt, batch, 8, adapter, logprobs)
                    seconds = raw_seconds(engine.llm, prompt, batch, completion, adapter, logprobs)
                    name = f"{batch}x{completion}{' adapter' * adapter}{' logprobs' * logprobs}"
                    found[name] = round(batch * completion / seconds, 1)
        print(json.dumps(found, indent=1), flush=True)
        return found

    def profile(self, engine: Any, batch: int) -> dict[str, Any]:
        """Return where 32 decoding steps under the adapter spend their time."""
        import torch

        (prompt,) = self.prompts(1, torch.Generator().manual_seed(6))
        raw_seconds(engine.llm, prompt, batch, 4, True)
        with torch.profiler.profile() as profiler:
            raw_seconds(engine.llm, prompt, batch, 32, True)
        found = top_kernels(profiler, 40)
        print(json.dumps(found, indent=1), flush=True)
        return found

    def speeds(self, engine: Any, setting: dict[str, Any], rank: int) -> dict[str, Any]:
        """Return seconds and tokens/s of the engine and of `LLM.generate`, the better of two."""
        import torch

        from lit_qrl.types import SamplingParams

        batch, completion = setting["batch"], setting["completion"]
        sampling = SamplingParams(max_tokens=completion, ignore_stop=True)
        generator = torch.Generator().manual_seed(batch * 10000 + completion)
        engine.generate(self.prompts(1, generator), batch, 0, None, SamplingParams(max_tokens=8, ignore_stop=True))
        ours, raw = [], []
        for repeat in range(self.args.long_iterations if completion >= 1024 else self.args.iterations):
            (prompt,) = self.prompts(1, generator)
            engine.llm.reset_prefix_cache()
            synchronize()
            start = time.perf_counter()
            engine.generate([prompt], batch, repeat, None, sampling)
            ours.append(time.perf_counter() - start)
            if not self.args.no_raw:
                raw.append(raw_seconds(engine.llm, *self.prompts(1, generator), batch, completion, True))
        speed = batch * completion / min(ours)
        found = {"rank": rank, "seconds": {"generate": round(min(ours), 3)}, "peaks": {"rollout": memory(reset=False)}}
        return found | {
            "rollout_tokens_per_second": round(speed, 1),
            "raw_seconds": round(min(raw), 3) if raw else None,
        }

    def prompts(self, count: int, generator: Any) -> list[list[int]]:
        import torch

        return torch.randint(3, self.config.vocab_size, (count, self.args.prompt), generator=generator).tolist()

    def weights(self) -> Any:
        import torch

        generator = torch.Generator(self.device).manual_seed(0)
        for name, parameter in self.network.named_parameters():
            options = {"device": self.device, "dtype": torch.bfloat16}
            if "norm" in name:
                yield name, torch.ones(parameter.shape, **options)
            else:
                yield name, torch.empty(parameter.shape, **options).normal_(std=0.02, generator=generator)

    def adapter(self, rank: int) -> Any:
        import torch

        generator = torch.Generator(self.device).manual_seed(1)
        options = {"device": self.device, "dtype": torch.bfloat16}
        for layer, (out, inside) in self.shapes.items():
            for end, shape in (("A", (rank, inside)), ("B", (out, rank))):
                tensor = torch.empty(shape, **options).normal_(std=0.01, generator=generator)
                yield f"base_model.model.{layer}.lora_{end}.weight", tensor


# ----------------------------------------------------------------------------------------------------------- figures


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per setting: medians over its iterations, peaks over all of them."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        key = (row.get("rank"), row.get("checkpointing"), row["batch"], row["completion"])
        groups.setdefault(key, []).append(row)
    found = []
    for (rank, gc, batch, completion), members in groups.items():
        one: dict[str, Any] = {"rank": rank, "gc": gc, "batch": batch, "tokens": completion}
        if any(row.get("oom") for row in members):
            found.append(one | {"step": "out of memory"})
            continue
        warm = [row for row in members if not rehearses(row)]
        if not warm:
            continue
        for name in warm[0]["seconds"]:
            one[name] = statistics.median(row["seconds"][name] for row in warm)
        steps = [row["step_seconds"] for row in warm if "step_seconds" in row]
        raw = next((row["raw_seconds"] for row in warm if row.get("raw_seconds")), None)
        one["tokens_per_s"] = statistics.median(row["rollout_tokens_per_second"] for row in warm)
        if raw:
            one["raw"], one["of_raw"] = raw, round(raw / one["generate"], 3)
        if steps:
            one["step"] = statistics.median(steps)
            if raw:
                one["bound"] = round(BOUND_FACTOR * raw + BOUND_SECONDS, 2)
        for kind in ("torch", "device"):
            one[f"peak_{kind}"] = max(peak[kind] for row in members for peak in row["peaks"].values())
        one["mismatch"] = next((row["mismatch"] for row in reversed(warm) if row.get("mismatch") is not None), None)
        found.append(one)
    return found


def table(results: dict[str, dict[str, Any]]) -> None:
    """Print one row per setting."""
    heads = ["case", "gc", "rank", "batch", "tokens", "tokens_per_s", "of_raw", "raw", "generate", "score", "update"]
    heads += ["publish", "verify", "step", "bound", "peak_torch", "peak_device", "mismatch"]
    print("\n" + " | ".join(f"{head:>9}" for head in heads))
    for name, figures in results.items():
        for row in summary(figures.get("rows", [])):
            cells = [name.replace("steps/", ""), *(row.get(head) for head in heads[1:])]
            print(" | ".join(f"{shown(cell):>9}" for cell in cells))
        rest = {key: value for key, value in figures.items() if key not in ("rows", "running", "profile")}
        for kind in ("torch", "device"):
            peaks = [peak[kind] for row in figures.get("rows", []) for peak in row.get("peaks", {}).values()]
            rest[f"peak_{kind}"] = max(peaks, default=None)
        print(f"# {name}: {json.dumps(rest)}", flush=True)


def shown(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "on" if cell else "off"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


if __name__ == "__main__":
    main()
