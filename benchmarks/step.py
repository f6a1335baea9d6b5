"""Seconds per iteration of this trainer against TRL's `GRPOTrainer`, on the CPU, in one process, one after the other.

Three cases, each with the same random 1 M-parameter Qwen3, prompts, group size, limits, dtype and threads:

- short: 32 prompts × 8 completions of up to 16 tokens, fp32 sampler, no correction: equal work.
- long: the same with up to 256 tokens of very uneven lengths (the head is biased so that they end after 90 on average).
- fp8: short with an emulated FP8 sampler, AIS and all metrics on this side, against TRL's plain iteration.

TRL runs with its quickest settings here: no gradient checkpointing, no logging, no saving, transformers generation.

    pip install trl==1.16.0
    python benchmarks/step.py --out step.json
"""

import argparse
import json
import logging
import math
import os
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from lightning.pytorch import Callback, Trainer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from lit_qrl.callbacks import AIS, Guard, MismatchMonitor, WeightPublisher
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.data.task import Task
from lit_qrl.module import GRPOModule
from lit_qrl.objective import GRPO
from lit_qrl.policy import CausalPolicy
from lit_qrl.rewards.base import Reward
from lit_qrl.rollout.embedded.engine import TransformersEngine

WORDS = ["<pad>", "<eos>", *"0123456789+-*/()=,:abcdefghijk"]
PROMPTS, GROUP = 32, 8
LEARNING_RATE = 1e-6  # small, so that the lengths stay what they are
WARM_UP = 2  # iterations that are not counted


@dataclass
class Case:
    """What one comparison runs."""

    limit: int
    mean_length: float
    iterations: int
    trl_batch: int
    micro_batches: int
    format: str = "auto"
    corrected: bool = False
    bound: float = 1.0


CASES = {
    "short": Case(limit=16, mean_length=14, iterations=16, trl_batch=256, micro_batches=1, bound=1.0),
    "long": Case(limit=256, mean_length=90, iterations=5, trl_batch=32, micro_batches=4, bound=0.5),
    "fp8": Case(
        limit=16, mean_length=14, iterations=16, trl_batch=256, micro_batches=1,
        format="fp8_tensor", corrected=True, bound=1.5,
    ),
}  # fmt: skip


@dataclass
class Timing:
    """Medians over the counted iterations of one run."""

    wall: float
    cpu: float
    tokens_per_second: float
    mean_length: float


class Clock:
    """Collects the wall time, CPU time and tokens of each iteration."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.tokens: list[int] = []

    def mark(self) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))

    def timing(self) -> Timing:
        pairs = list(zip(self.marks[:-1], self.marks[1:], strict=True))[WARM_UP - 1 :]
        wall = statistics.median(after[0] - before[0] for before, after in pairs)
        cpu = statistics.median(after[1] - before[1] for before, after in pairs)
        tokens = statistics.mean(self.tokens)
        return Timing(wall, cpu, tokens / wall, tokens / (PROMPTS * GROUP))


def questions(count: int = 512) -> list[str]:
    draw = random.Random(0)
    return [
        f"{draw.randint(1, 20)},{draw.randint(1, 20)},{draw.randint(1, 9)}={draw.randint(1, 99)}:" for _ in range(count)
    ]


def score(texts: list[str]) -> list[float]:
    return [float(text.count("1")) for text in texts]


def write_model(folder: Path, mean_length: float) -> None:
    """Write a random model whose completions end after `mean_length` tokens on average, whatever was drawn before.

    The first channel of the residual stream is nearly constant, and only the end token's row of the head reads it.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread, constant = 0.5, 3.0
    with torch.no_grad():
        embedding, head = network.model.embed_tokens.weight, network.lm_head.weight
        embedding.mul_(spread / embedding.std())
        embedding[:, 0] = constant
        channel = constant / math.sqrt((constant**2 + spread**2 * (config.hidden_size - 1)) / config.hidden_size)
        head[:, 0] = 0
        head[1] = 0
        head[1, 0] = math.log((len(WORDS) - 1) / (mean_length - 1)) / channel
    network.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


# ------------------------------------------------------------------------------------------------------------ this side


class CountOnes(Reward):
    """The same reward as on the other side."""

    name = "ones"

    def __call__(self, samples):
        return score([sample.completion for sample in samples])


class Questions(Task):
    """The same prompts as on the other side."""

    name = "questions"

    def __init__(self) -> None:
        self.rewards = [CountOnes()]

    def train_rows(self):
        return [{"prompt": question} for question in questions()]

    def evaluation_rows(self):
        return self.train_rows()[:1]

    def prompt(self, row):
        return row["prompt"]

    def reference(self, row):
        return None

    def is_correct(self, samples):
        return [False for _ in samples]


class Watch(Callback):
    """Marks the end of each iteration."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == 0:
            self.clock.tokens.append(int(pl_module.iteration.rollout.mask.sum()))

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.clock.mark()


def run_ours(model: Path, case: Case) -> Timing:
    clock = Clock()
    module = GRPOModule(
        CausalPolicy(str(model)),
        objective=GRPO(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
    )
    data = RolloutDataModule(
        Questions(), TransformersEngine(), prompts_per_iteration=PROMPTS, group_size=GROUP,
        micro_batches=case.micro_batches, max_prompt_tokens=32, max_completion_tokens=case.limit, seed=0,
    )  # fmt: skip
    callbacks: list[Callback] = [WeightPublisher(format=case.format), Guard()]
    if case.corrected:
        callbacks = [AIS(), *callbacks, MismatchMonitor()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=case.iterations, callbacks=[*callbacks, Watch(clock)],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0, num_sanity_val_steps=0, use_distributed_sampler=False, gradient_clip_val=1.0,
            accumulate_grad_batches=case.micro_batches, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, datamodule=data)
    return clock.timing()


# ------------------------------------------------------------------------------------------------------------ the other


def run_trl(model: Path, case: Case) -> Timing:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = Clock()

    class Steps(TrainerCallback):
        def on_step_end(self, *args, **kwargs) -> None:
            clock.mark()

    def reward(completions, completion_ids, **kwargs):
        clock.tokens.append(sum(map(len, completion_ids)))
        return score(completions)

    batch = case.trl_batch
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=batch, gradient_accumulation_steps=PROMPTS * GROUP // batch,
            num_generations=GROUP, max_completion_length=case.limit, max_steps=case.iterations,
            learning_rate=LEARNING_RATE, beta=0.0, num_iterations=1, bf16=False, fp16=False, use_cpu=True,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, use_vllm=False, max_grad_norm=1.0,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": questions()}),
            processing_class=PreTrainedTokenizerFast.from_pretrained(model),
            callbacks=[Steps()],
        )
        trainer.train()
    return clock.timing()


def compare(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians over `rounds` alternating runs of each side."""
    sides: dict[str, Callable[[Path, Case], Timing]] = {"trl": run_trl, "lit_qrl": run_ours}
    runs: dict[str, list[Timing]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), case.mean_length)
        for _ in range(rounds):
            for name, run in sides.items():
                runs[name].append(run(Path(folder), case))
    fields = asdict(runs["trl"][0])
    return {
        name: {field: statistics.median(getattr(t, field) for t in timings) for field in fields}
        for name, timings in runs.items()
    }


def quiet() -> None:
    """Silence both libraries' start-up advice and progress bars."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.callbacks.model_summary"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2, help="alternating runs of each side")
    parser.add_argument("--iterations", type=int, help="instead of each case's own number")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.iterations is not None and options.iterations <= WARM_UP:
        parser.error(f"--iterations must be more than {WARM_UP}: the first {WARM_UP} are not counted.")
    torch.set_num_threads(options.threads)
    quiet()
    results = {}
    for name in options.cases:
        case = CASES[name]
        if options.iterations:
            case.iterations = options.iterations
        results[name] = compare(case, options.rounds)
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    columns = ("trl s/it", "ours s/it", "ratio", "bound", "cpu ratio", "trl tok/s", "ours tok/s")
    print(f"{'case':6} " + " ".join(f"{column:>10}" for column in columns))
    for name, sides in results.items():
        trl, ours = sides["trl"], sides["lit_qrl"]
        sides["ratio"] = {"wall": ours["wall"] / trl["wall"], "cpu": ours["cpu"] / trl["cpu"]}
        seconds = f"{trl['wall']:10.3f} {ours['wall']:10.3f} {sides['ratio']['wall']:10.2f} {CASES[name].bound:10.2f}"
        rates = f"{trl['tokens_per_second']:10.0f} {ours['tokens_per_second']:10.0f}"
        print(f"{name:6} {seconds} {sides['ratio']['cpu']:10.2f} {rates}")
    if options.out:
        cases = {name: {**asdict(CASES[name]), **sides} for name, sides in results.items()}
        options.out.write_text(
            json.dumps({"threads": options.threads, "torch": torch.__version__, "cases": cases}, indent=1)
        )


if __name__ == "__main__":
    main()
