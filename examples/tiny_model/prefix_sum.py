"""Build `models/tiny-prefix-sum`, a Qwen3 of 0.3 million parameters that gets half of the 16-digit prefix sums right.

It is trained by imitation on problems of the training side of the `PrefixSum` task, at a constant rate, until the
sampled accuracy on held-out problems reaches the one asked for. Digits of the answer are right with a probability of
0.96 then, and nothing stands in the way of 1: what reinforcement learning adds is the rest.

Run `python examples/tiny_model/prefix_sum.py` to rebuild it. The result repeats bit for bit on one machine with one
version of torch and one number of threads.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from build import build_tokenizer, save
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lit_qrl.data.tasks.generated import is_held_out
from lit_qrl.data.tasks.prefix_sum import PrefixSum, running_sums
from lit_qrl.network.structure import cached

SHIPPED = Path(__file__).parents[2] / "models" / "tiny-prefix-sum"
CHECK_EVERY = 5
CHECK_BELOW = 0.5
"""Loss from which on the accuracy is worth a look; 0.1 or so goes with half of the answers right."""
CHECKED = 512
"""Held-out problems on which the accuracy is looked at."""


@dataclass(frozen=True)
class Recipe:
    """What the shipped model was made with.

    Args:
        digits: of a problem.
        hidden: width; every linear layer has input and output sizes that are multiples of 64, inputs of 128.
        layers: transformer blocks.
        intermediate: width of the feed-forward part.
        batch: problems per step.
        lr: of AdamW, constant after 50 steps.
        accuracy: at which training stops.
        max_steps: at which it has failed.
        seed: of initialisation and data.
    """

    digits: int = 16
    hidden: int = 128
    layers: int = 2
    intermediate: int = 256
    batch: int = 128
    lr: float = 2e-3
    accuracy: float = 0.5
    max_steps: int = 6000
    seed: int = 0


def build_network(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return the untrained network in fp32."""
    torch.manual_seed(recipe.seed)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden,
        "head_dim": 32,
        "num_attention_heads": recipe.hidden // 32,
        "num_key_value_heads": recipe.hidden // 64,
        "num_hidden_layers": recipe.layers,
        "intermediate_size": recipe.intermediate,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "attn_implementation": "eager",
    }
    return Qwen3ForCausalLM(Qwen3Config(**options))


class Teacher:
    """Solved problems of the training side, as batches of token ids."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        self.recipe, self.rng = recipe, random.Random(recipe.seed)
        self.ids, self.task = tokenizer.get_vocab(), PrefixSum(digits=recipe.digits)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return token ids and labels ("b s"); labels are −100 outside the answers."""
        rows = []
        while len(rows) < self.recipe.batch:
            row = self.task.draw(self.rng)
            if not is_held_out(self.task.key(row)):
                text = self.task.short(row) + running_sums(row["digits"])
                rows.append([*(self.ids[character] for character in text), self.ids["<eos>"]])
        tokens = torch.tensor(rows)
        labels = tokens.clone()
        labels[:, : self.recipe.digits + 1] = -100
        return tokens, labels


@torch.no_grad()
def evaluate(network: Any, tokenizer: PreTrainedTokenizerFast, task: PrefixSum, seed: int = 0) -> float:
    """Return the share of held-out problems that an answer sampled at temperature 1 gets right, end token included."""
    ids, rows = tokenizer.get_vocab(), task.evaluation_rows()
    tokens = torch.tensor([[ids[character] for character in task.short(row)] for row in rows])
    wanted = torch.tensor([[*(ids[c] for c in task.reference(row)), ids["<eos>"]] for row in rows])
    generator = torch.Generator().manual_seed(seed)
    network.eval()
    cache, step, right = DynamicCache(), tokens, torch.ones(len(rows), dtype=torch.bool)
    for position in range(wanted.shape[1]):
        output = network(input_ids=step, **cached(network, cache))
        step = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=generator)
        right &= step[:, 0] == wanted[:, position]
    return right.float().mean().item()


def build(output: Path, recipe: Recipe) -> dict[str, float]:
    """Train, save to `output` and return the steps taken and the accuracy of the last check."""
    started, tokenizer = time.perf_counter(), build_tokenizer()
    network, teacher = build_network(recipe, tokenizer), Teacher(recipe, tokenizer)
    task = PrefixSum(digits=recipe.digits, train_size=1, evaluation_size=CHECKED)
    print(f"{sum(p.numel() for p in network.parameters())} parameters", flush=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)
    accuracy = 0.0
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, step / 50)
        network.train()
        tokens, labels = teacher.batch()
        loss = F.cross_entropy(network(input_ids=tokens).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            accuracy = evaluate(network, tokenizer, task) if loss.item() < CHECK_BELOW else 0.0
            seconds = time.perf_counter() - started
            print(f"step {step} loss {loss.item():.3f} accuracy {accuracy:.3f} {seconds:.0f} s", flush=True)
            if accuracy >= recipe.accuracy:
                break
    save(network, tokenizer, output)
    return {"steps": step, "accuracy": accuracy}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SHIPPED)
    parser.add_argument("--threads", type=int, default=1)
    for name, value in vars(Recipe()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = Recipe(**{name: getattr(options, name) for name in vars(Recipe())})
    result = build(options.output, recipe)
    print(json.dumps(result))
    return 0 if result["accuracy"] >= recipe.accuracy else 1


if __name__ == "__main__":
    raise SystemExit(main())
