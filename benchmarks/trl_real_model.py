"""The run of `real_model.py` with TRL's GRPO trainer and its vLLM in the same process; started by it.

    python benchmarks/trl_real_model.py --config configs/real/gsm8k.yaml --KEY VALUE …

Sizes, rates and prompts are read from that YAML, the reward is the same function. TRL's defaults stay but for what
makes both the same work. It evaluates greedily with its own vLLM, after a sync of the weights, as often as the run
here, and writes the columns of `metrics.csv` that `real_model.py` reads.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

with socket.socket() as _free:  # another run may start at the same time
    _free.bind(("127.0.0.1", 0))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(_free.getsockname()[1])
COLUMNS = ("iteration", "reward/mean", "time/iteration", "val/greedy_pass@1", "val/greedy_stopped")


def settings(words: list[str]) -> dict[str, Any]:
    """Return the configuration of `--config` files and of options over it."""
    import yaml

    config: dict[str, Any] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        if option == "--config":
            merge(config, yaml.safe_load(Path(value).read_text()))
            continue
        *way, last = option.removeprefix("--").split(".")
        place = config
        for key in way:
            place = place.setdefault(key, {})
            place = place.get("init_args", place)
        place[last] = yaml.safe_load(value)
    return config


def merge(config: dict[str, Any], more: dict[str, Any]) -> None:
    """Lay one configuration over another, in place."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = value


def main() -> None:
    """Train, and write a row for each iteration and each evaluation."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl_iteration import inspect_here  # beside this script
    from vllm import SamplingParams

    from lit_qrl.rewards.simple import boxed_number

    config = settings(sys.argv[1:])
    policy, data, trainer_ = config["model"]["policy"]["init_args"], config["data"], config["trainer"]
    task, run, most = data["task"]["init_args"], Path(trainer_["default_root_dir"]), data["max_completion_tokens"]
    model, updates, sequences = (
        policy["model"],
        data["mini_batches"],
        data["prompts_per_iteration"] * data["group_size"],
    )
    run.mkdir(parents=True, exist_ok=True)
    metrics = run / "metrics.csv"
    metrics.write_text(",".join(COLUMNS) + "\n")

    def write(**row: float) -> None:
        named = {name.replace("_at_", "@").replace("__", "/"): value for name, value in row.items()}
        with metrics.open("a") as file:
            file.write(",".join(str(named.get(name, "")) for name in COLUMNS) + "\n")

    def posed(path: str) -> list[dict[str, Any]]:
        rows = [json.loads(text) for text in Path(path).read_text().splitlines()]
        asked = [{"role": "user", "content": row["question"] + task["prompt_suffix"]} for row in rows]
        return [{"prompt": [turn], "answer": row["answer"]} for turn, row in zip(asked, rows, strict=True)]

    held_out = posed(task["evaluation_path"])
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    inspect_here()

    class Clock(TrainerCallback):
        last = reward = 0.0

        def evaluate(self, iteration: int) -> None:
            generation = trainer.vllm_generation
            generation.sync_weights()
            words = [
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
                for row in held_out
            ]
            ids = [{"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in words]
            drawn = generation.llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=most), use_tqdm=False)
            answers = [one.outputs[0] for one in drawn]
            right = boxed_number([one.text for one in answers], [row["answer"] for row in held_out])
            stopped = [one.finish_reason == "stop" for one in answers]
            share = {"val__greedy_stopped": sum(stopped) / len(stopped)}
            write(iteration=iteration, **{"val__greedy_pass_at_1": sum(right) / len(right)}, **share)

        def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            if config["model"].get("evaluate_first", True):
                self.evaluate(0)
            self.last = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
            self.reward = (logs or {}).get("reward", self.reward)  # logged with the first update after a rollout
            if "loss" not in (logs or {}) or state.global_step % updates:
                return
            iteration, now = state.global_step // updates, time.perf_counter()
            write(iteration=iteration, reward__mean=self.reward, time__iteration=now - self.last)
            print(iteration, f"{now - self.last:.2f} s", f"reward {self.reward:.3f}", flush=True)
            if iteration % trainer_["check_val_every_n_epoch"] == 0:
                self.evaluate(iteration)
            self.last = time.perf_counter()

    adapter = {**policy["lora"]["init_args"]} if policy.get("lora") else None
    size = 16
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=boxed_number,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(posed(task["path"])),
        callbacks=[Clock()],
        peft_config=LoraConfig(task_type="CAUSAL_LM", **adapter) if adapter else None,
        args=GRPOConfig(
            output_dir=str(run / "trl"),
            max_steps=trainer_["max_epochs"] * updates,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=sequences // updates // size,
            generation_batch_size=sequences,
            num_generations=data["group_size"],
            max_completion_length=most,
            model_init_kwargs={"dtype": "bfloat16" if adapter else "float32"},  # fp32 weights are the masters here
            bf16=True,
            gradient_checkpointing=False,
            learning_rate=config["model"]["optimizer"]["init_args"]["lr"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=trainer_["gradient_clip_val"],
            beta=0.0,
            loss_type={"token": "dapo", "sequence": "grpo"}[config["model"]["objective"]["init_args"]["reduction"]],
            temperature=1.0,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=data["engine"].get("gpu_memory_utilization", 0.3),
            vllm_max_model_length=data["max_prompt_tokens"] + most,
            vllm_importance_sampling_mode="token_truncate",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config["seed_everything"],
        ),
    )
    trainer.train()
    trainer.model.to(torch.bfloat16).save_pretrained(run / "model")


if __name__ == "__main__":
    main()
