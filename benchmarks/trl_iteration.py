"""The run of a case of `iteration.py` with TRL's GRPO trainer and its vLLM in the same process; started by it.

    python benchmarks/trl_iteration.py CONFIG FOLDER

CONFIG is the YAML of the run here; what both have in common is read from it. Each iteration's row of FOLDER's
`metrics.csv` has the seconds between the ends of two. TRL's defaults stay, but for what makes both the same work.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def even_words(completions: list[str], **columns: Any) -> list[float]:
    """Return the share of even words of each completion."""
    shares = []
    for completion in completions:
        words = completion.split()
        shares.append(sum(word[-1] in "02468" for word in words) / max(len(words), 1))
    return shares


def main() -> None:
    """Train for as many iterations, writing when each ends."""
    import yaml
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config, run = yaml.safe_load(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    policy, data = config["model"]["policy"]["init_args"], config["data"]
    run.mkdir(parents=True, exist_ok=True)
    shutil.copytree(policy["tokenizer"], policy["model"], dirs_exist_ok=True)  # its vLLM looks for it there
    task, metrics = data["task"]["init_args"], run / "metrics.csv"
    rows = [{"prompt": json.loads(line)["question"]} for line in Path(task["path"]).read_text().splitlines()]
    metrics.write_text("time/iteration\n")
    sequences = data["prompts_per_iteration"] * data["group_size"]

    class Clock(TrainerCallback):
        last = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            now = time.perf_counter()
            with metrics.open("a") as file:
                file.write(f"{now - self.last}\n")
            self.last = now

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
            model_init_kwargs={"dtype": "bfloat16"},
            bf16=True,
            gradient_checkpointing=True,
            learning_rate=config["model"]["optimizer"]["init_args"]["lr"],
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=data["engine"]["init_args"]["gpu_memory_utilization"],
            vllm_max_model_length=data["max_prompt_tokens"] + data["max_completion_tokens"] + 1,
            vllm_importance_sampling_mode="token_truncate",
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(policy["tokenizer"], padding_side="left"),
        callbacks=[Clock()],
        peft_config=adapter,
    )
    trainer.train()


if __name__ == "__main__":
    main()
