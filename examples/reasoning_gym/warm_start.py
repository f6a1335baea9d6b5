"""A policy of the shipped one's size that has a rough idea of a task of reasoning-gym, in about a minute on one core.

It is trained by imitation on the library's answers, a share of which is made wrong, so that it writes answers of the
right form and is unsure which are right. What is left is reinforcement learning's:

    python examples/reasoning_gym/warm_start.py --output runs/sums-policy
    lit-qrl fit --config configs/quickstart.yaml --config examples/reasoning_gym/config.yaml \
        --model.policy.model runs/sums-policy
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_qrl.data.tasks import ReasoningGym

sys.path.append(str(Path(__file__).parents[1] / "tiny_model"))
from build import Recipe, build_network, build_tokenizer, save, train

CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
PROMPT = "{metadata[expression]}="


class Teacher:
    """Problems of the training side with their answers, a share of them wrong, as batches of token ids."""

    def __init__(self, recipe: Recipe, size: int) -> None:
        task = ReasoningGym("chain_sum", CONFIG, train_size=size, evaluation_size=500, prompt=PROMPT, seed=recipe.seed)
        task.setup()
        self.recipe, self.rng = recipe, random.Random(recipe.seed)
        self.ids = build_tokenizer().get_vocab()
        self.problems = [(str(task.prompt(row)), int(task.reference(row))) for row in task.train_rows()]

    def batch(self, wrong_share: float) -> tuple[Tensor, Tensor]:
        """Return token ids and labels ("b s"); labels are −100 outside the answers."""
        rows = []
        for problem, answer in self.rng.choices(self.problems, k=self.recipe.batch):
            wrong = self.rng.random() < wrong_share
            given = answer + self.rng.choice([-10, -2, -1, 1, 2, 10]) if wrong else answer
            rows.append(([self.ids[c] for c in problem], [*(self.ids[c] for c in str(given)), self.ids["<eos>"]]))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        tokens = torch.full((len(rows), width), self.ids["<pad>"])
        labels = torch.full((len(rows), width), -100)
        for row, (prompt, answer) in enumerate(rows):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return tokens, labels


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--unsure_steps", type=int, default=60)
    parser.add_argument("--wrong_share", type=float, default=0.6)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=6000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    recipe = Recipe(batch=options.batch)
    tokenizer = build_tokenizer()
    network, teacher = build_network(recipe, tokenizer), Teacher(recipe, options.size)
    stages = ((options.steps, recipe.lr, 0.0), (options.unsure_steps, recipe.unsure_lr, options.wrong_share))
    for stage, (steps, lr, wrong_share) in enumerate(stages, start=1):
        for step, loss in enumerate(train(network, teacher, steps, lr, wrong_share), start=1):  # type: ignore[arg-type]
            if step % 100 == 0 or step == steps:
                print(f"stage {stage} step {step} loss {loss:.3f}", flush=True)
    save(network, tokenizer, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
