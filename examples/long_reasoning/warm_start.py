"""Build a policy of 12 million parameters that adds columns of numbers in 200 tokens, every running total written out.

    python examples/long_reasoning/warm_start.py --output out/adder              # on a GPU, in minutes
    python examples/long_reasoning/warm_start.py --output out/small --device cpu --layers 2 --hidden 128 \
        --intermediate 256 --numbers 4 --digits 3 --batch 64                     # the same in small

It is trained by imitation on problems of the training side of `ColumnSum` until the probability of a whole trace
without an error, on held-out problems at temperature 1, reaches the one asked for: a token is right with a
probability of 0.997 then. That probability is computed, not sampled: the product of those of the trace's tokens.
The rate falls on a line towards its end, so that the way through one half is slow enough to be met.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path[:0] = [str(Path(__file__).parents[1] / "tiny_model"), str(Path(__file__).parent)]

from addition import CHARACTERS  # noqa: E402
from build import build_tokenizer, save  # noqa: E402

from lit_qrl.data.tasks.generated import is_held_out  # noqa: E402

CHECK_EVERY = 2
PRINT_EVERY = 10
CHECK_BELOW = 0.05
"""Loss from which on the accuracy is worth a look; 0.003 or so goes with half of the traces right."""
CHECKED = 256
"""Held-out problems on which the accuracy is computed."""
WARM_UP = 30


@dataclass(frozen=True)
class Recipe:
    """What the policy is made with.

    Args:
        numbers: of a problem.
        digits: of a number.
        hidden: width; every linear layer has input sizes that are multiples of 128.
        layers: transformer blocks.
        intermediate: width of the feed-forward part.
        batch: problems per step.
        lr: of Muon, for matrices; half of it is AdamW's, for the rest. It falls to zero at max_steps.
        accuracy: at which training stops.
        max_steps: at which it has failed.
        max_seconds: likewise.
        seed: of initialisation and data.
    """

    numbers: int = 25
    digits: int = 7
    hidden: int = 512
    layers: int = 4
    intermediate: int = 1536
    batch: int = 128
    lr: float = 3e-3
    accuracy: float = 0.5
    max_steps: int = 3000
    max_seconds: float = 300.0
    seed: int = 0


def build_network(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return the untrained network in fp32."""
    torch.manual_seed(recipe.seed)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden,
        "head_dim": 64,
        "num_attention_heads": recipe.hidden // 64,
        "num_key_value_heads": 2,
        "num_hidden_layers": recipe.layers,
        "intermediate_size": recipe.intermediate,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return Qwen3ForCausalLM(Qwen3Config(**options))


class Teacher:
    """Solved problems of one side of the task, as token ids and labels ("b s"); labels are −100 outside the traces.

    Args:
        recipe: numbers and digits of a problem.
        tokenizer: one token for each character.
        held_out: the side: what no run trains on, or the rest.
        seed: of the draw.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, held_out: bool, seed: int) -> None:
        self.recipe, self.held_out = recipe, held_out
        self.generator = torch.Generator().manual_seed(seed)
        ids = tokenizer.get_vocab()
        self.digit_ids = torch.tensor([ids[str(digit)] for digit in range(10)])
        self.comma, self.colon, self.eos = ids[","], ids[":"], ids["<eos>"]

    def draw(self, count: int) -> Tensor:
        """Return the digits of numbers of this side, lowest first ("count numbers digits")."""
        shape, found = (count, self.recipe.numbers, self.recipe.digits), []
        while len(found) < count:
            drawn = torch.randint(10, shape, generator=self.generator)
            if not self.held_out:
                # Sums of uniform digits tell nothing of one operand alone, and neither place is found: half of the
                # problems have numbers of small digits.
                largest = torch.randint(10, (count, self.recipe.numbers, 1), generator=self.generator)
                largest[::2] = 9
                drawn = drawn * (largest + 1) // 10
            for problem in drawn:
                text = ",".join(bytes(number).decode() for number in (problem + ord("0")).tolist())
                if is_held_out(text) == self.held_out:
                    found.append(problem)
        return torch.stack(found[:count])

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Return token ids and labels of `count` problems."""
        numbers = self.draw(count)
        powers = 10 ** torch.arange(self.recipe.digits)
        totals = (numbers * powers).sum(-1).cumsum(-1) % 10**self.recipe.digits
        lines = []
        for digits, last in ((numbers, self.colon), (totals[..., None] // powers % 10, self.eos)):
            ends = torch.full((count, self.recipe.numbers, 1), self.comma)
            ends[:, -1] = last
            lines.append(torch.cat([self.digit_ids[digits], ends], -1).flatten(1))
        tokens = torch.cat(lines, 1)
        labels = tokens.clone()
        labels[:, : lines[0].shape[1]] = -100
        return tokens, labels


def trace_losses(network: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return minus the log-prob of each trace ("b"), in nats."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = network(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1).sum(1)


@torch.no_grad()
def evaluate(network: nn.Module, tokens: Tensor, labels: Tensor) -> float:
    """Return the probability that a trace sampled at temperature 1 has no error, end token included."""
    network.eval()
    return trace_losses(network, tokens, labels).neg().exp().mean().item()


def build(output: Path, recipe: Recipe, device: str) -> dict[str, float]:
    """Train, save to `output`; return steps and seconds taken, the last check's accuracy, and the weights' sum."""
    started, tokenizer = time.perf_counter(), build_tokenizer(CHARACTERS)
    network = build_network(recipe, tokenizer).to(device)
    teacher = Teacher(recipe, tokenizer, held_out=False, seed=recipe.seed)
    checked = [part.to(device) for part in Teacher(recipe, tokenizer, held_out=True, seed=recipe.seed).batch(CHECKED)]
    print(f"{sum(p.numel() for p in network.parameters())} parameters", flush=True)
    named = list(network.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.lr / 2, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / WARM_UP, 1 - step / recipe.max_steps))
        for o in optimizers
    ]
    accuracy, seconds = 0.0, 0.0
    for step in range(1, recipe.max_steps + 1):
        network.train()
        tokens, labels = (part.to(device) for part in teacher.batch(recipe.batch))
        loss = trace_losses(network, tokens, labels).mean() / (labels[0] != -100).sum()
        network.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % CHECK_EVERY == 0:
            value = loss.item()
            accuracy = evaluate(network, *checked) if value < CHECK_BELOW else 0.0
            seconds = time.perf_counter() - started
            if accuracy or step % PRINT_EVERY == 0:
                print(f"step {step} loss {value:.4f} accuracy {accuracy:.3f} {seconds:.0f} s", flush=True)
            if accuracy >= recipe.accuracy or seconds > recipe.max_seconds:
                break
    save(network, tokenizer, output)
    total = sum(p.double().abs().sum().item() for p in network.parameters())
    return {"steps": step, "accuracy": accuracy, "seconds": round(seconds, 1), "weights": round(total, 6)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    for name, value in vars(Recipe()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args(arguments)
    # The same policy from every call on one model of GPU, so that seeds of several calls train one policy.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for choice in ("flash", "mem_efficient", "cudnn"):  # whose backward sums in any order
        getattr(torch.backends.cuda, f"enable_{choice}_sdp")(False)
    recipe = Recipe(**{name: getattr(options, name) for name in vars(Recipe())})
    result = build(options.output, recipe, options.device)
    print(json.dumps(result))
    return 0 if result["accuracy"] >= recipe.accuracy else 1


if __name__ == "__main__":
    raise SystemExit(main())
