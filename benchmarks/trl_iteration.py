"""The run of a case of `iteration.py` with TRL's GRPO trainer and its vLLM in the same process; started by it.

    python benchmarks/trl_iteration.py CONFIG FOLDER

CONFIG is the YAML of the run here; what both have in common is read from it. Each iteration's row of FOLDER's
`metrics.csv` has the seconds between the ends of two, and what TRL's own timers say of them. TRL's defaults stay, but
for what makes both the same work; vLLM looks at the model's class in this process, as here, which shortens the start.
"""

import collections
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

with socket.socket() as _free:  # another run may start on another GPU at the same time
    _free.bind(("127.0.0.1", 0))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(_free.getsockname()[1])
PHASES = ("iteration", "rollout", "publish", "score", "update")


def even_words(completions: list[str], **columns: Any) -> list[float]:
    """Return the share of even words of each completion."""
    shares = []
    for completion in completions:
        words = completion.split()
        shares.append(sum(word[-1] in "02468" for word in words) / max(len(words), 1))
    return shares


def main() -> None:
    """Train for as many iterations, writing when each ends."""
    import torch
    import yaml
    from datasets import Dataset
    from gate import wait  # beside this script
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras.profiling import ProfilingContext

    wait()
    config, run = yaml.safe_load(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    policy, data = config["model"]["policy"]["init_args"], config["data"]
    engine = data["engine"] if data["engine"]["class_path"] == "VLLMEngine" else None
    run.mkdir(parents=True, exist_ok=True)
    task, metrics = data["task"]["init_args"], run / "metrics.csv"
    rows = [{"prompt": json.loads(line)["question"]} for line in Path(task["path"]).read_text().splitlines()]
    metrics.write_text(",".join(f"time/{phase}" for phase in PHASES) + "\n")
    masters = "fp32" if config["model"]["master_weights"] and "lora" not in policy else "bf16"
    sequences = data["prompts_per_iteration"] * data["group_size"]
    parts: dict[str, float] = collections.defaultdict(float)

    def timed(context: Any, duration: float) -> None:
        parts[context.name.removeprefix("GRPOTrainer.")] += duration

    ProfilingContext._log_metrics = timed
    if engine:
        inspect_here()

    class Clock(TrainerCallback):
        last = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            now = time.perf_counter()
            drawn, sent = parts["vLLM.generate"] + parts["transformers.generate"], parts["sync_weights"]
            prepared = parts["_prepare_inputs"]
            row = (now - self.last, drawn, sent, prepared - drawn - sent, now - self.last - prepared)
            with metrics.open("a") as file:
                file.write(",".join(map(str, row)) + "\n")
            self.last = now
            parts.clear()

    adapter = LoraConfig(**policy["lora"]["init_args"]) if "lora" in policy else None
    trainer = GRPOTrainer(
        model=policy["model"],
        reward_funcs=even_words,
        args=GRPOConfig(
            output_dir=str(run / "trl"),
            max_steps=config["trainer"]["max_epochs"],
            per_device_train_batch_size=sequences // data["micro_batches"],
            gradient_accumulation_steps=data["micro_batches"],
            num_generations=data["group_size"],
            max_completion_length=data["max_completion_tokens"],
            model_init_kwargs={"dtype": "float32" if masters == "fp32" else "bfloat16"},
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=policy.get("gradient_checkpointing", True),  # unless `--recompute` says otherwise
            learning_rate=config["model"]["optimizer"]["init_args"]["lr"],
            **(vllm_options(data, engine["init_args"]) if engine else {}),
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(policy["tokenizer"], padding_side="left"),
        callbacks=[Clock()],
        peft_config=adapter,
    )
    trainer.train()


def vllm_options(data: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of TRL's config for a vLLM in this process."""
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": engine["gpu_memory_utilization"],
        "vllm_max_model_length": data["max_prompt_tokens"] + data["max_completion_tokens"] + 1,
        "vllm_importance_sampling_mode": "token_truncate",
    }


def inspect_here() -> None:
    """Let vLLM look at the model's class in this process instead of another, which imports everything anew."""
    with contextlib.suppress(ImportError, AttributeError):  # a start that takes longer is one all the same
        from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

        _LazyRegisteredModel.inspect_model_cls = lambda model: _ModelInfo.from_model_cls(model.load_model_cls())


if __name__ == "__main__":
    main()
