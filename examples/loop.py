"""GRPO with an FP8 sampler and AIS, whole, in one file: what `lit-qrl quickstart` does, without a trainer.

    python examples/loop.py

The sampler is a copy of the policy whose linear layers multiply in FP8, so its log-probs differ from the learner's. AIS
(adaptive importance sampling) measures by how much, and weighs each token as far as that is needed. Formulas come from
`lit_qrl.functional` (tensors in, tensors out), formats from `lit_qrl.formats`; the rest is torch and transformers. What
a run has beside this (publishes that are verified, vLLM, resuming, memory, reports) is what the library is for.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from lit_qrl import formats
from lit_qrl.data.tasks import Countdown
from lit_qrl.formats.base import NumberFormat, PreparedWeight
from lit_qrl.functional.adaptive import ais_gate, ais_weights
from lit_qrl.functional.advantage import group_advantages
from lit_qrl.functional.importance import log_ratio
from lit_qrl.functional.mismatch import mismatch_metrics
from lit_qrl.functional.objective import clipped_surrogate
from lit_qrl.functional.reduction import reduce
from lit_qrl.rewards.base import Sample
from lit_qrl.shipped import shipped

MODEL = "models/tiny-countdown-products"  # one million parameters, with a habit of multiplying
PROMPTS, GROUP, TOKENS, ITERATIONS, RATE = 32, 8, 16, 60, 3e-4


# --------------------------------------------------------------------------------------------------------- the sampler


class LowBitLinear(nn.Module):
    """A linear layer that multiplies as an engine does: a quantized weight and, in FP8, a quantized input."""

    def __init__(self, format: NumberFormat) -> None:
        super().__init__()
        self.format = format
        self.prepared: PreparedWeight | None = None
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.prepared is not None, "publish() comes before the first forward pass."
        return self.format.apply(x, self.prepared, self.bias)


def low_bit_copy(learner: nn.Module, format: NumberFormat) -> nn.Module:
    """Return a copy whose decoder layers multiply in `format`; embeddings, norms and the head stay as they are."""
    sampler = copy.deepcopy(learner).requires_grad_(False).eval()
    for name, layer in list(sampler.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            sampler.set_submodule(name, LowBitLinear(format))
    return sampler


@torch.no_grad()
def publish(learner: nn.Module, sampler: nn.Module) -> None:
    """Give the sampler the learner's weights of now, quantized."""
    for name, parameter in learner.named_parameters():
        path, _, kind = name.rpartition(".")
        layer = sampler.get_submodule(path)
        if isinstance(layer, LowBitLinear) and kind == "weight":
            layer.prepared = layer.format.prepare(layer.format.quantize(parameter), parameter.dtype)
        elif isinstance(layer, LowBitLinear):
            layer.bias = parameter.clone()
        else:
            layer.get_parameter(kind).copy_(parameter)


# ----------------------------------------------------------------------------------------------------------- a rollout


@torch.no_grad()
def draw(sampler: Any, tokenizer: Any, prompts: Sequence[str], greedy: bool = False) -> tuple[dict, Tensor, Tensor]:
    """Return prompts as the tokenizer pads them, completions "b t", and the log-probs with which they were drawn."""
    asked = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    out = sampler.generate(
        **asked,
        max_new_tokens=TOKENS,
        do_sample=not greedy,
        top_k=None,  # the whole vocabulary, not transformers' 50 words
        pad_token_id=tokenizer.pad_token_id,
        return_dict_in_generate=True,
        output_logits=True,
    )
    drawn = out.sequences[:, asked["input_ids"].shape[1] :]
    logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    return asked, drawn, logprobs


def score(policy: Any, asked: dict, drawn: Tensor) -> Tensor:
    """Return the log-probs "b t" of completions, in the arithmetic of `policy`."""
    tokens = torch.cat([asked["input_ids"], drawn], dim=1)
    attention = torch.cat([asked["attention_mask"], torch.ones_like(drawn)], dim=1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = policy(input_ids=tokens, attention_mask=attention, position_ids=positions).logits
    return logits[:, -drawn.shape[1] - 1 : -1].log_softmax(-1).gather(-1, drawn[..., None])[..., 0]


def counted(drawn: Tensor, end: int) -> Tensor:
    """Return True "b t" up to each completion's end token, which was drawn too."""
    ended = (drawn == end).int()
    return (ended.cumsum(1) - ended) == 0


def rewards_of(task: Countdown, rows: Sequence[Any], tokenizer: Any, drawn: Tensor) -> Tensor:
    """Return the rewards " b": 1 for an expression that uses every number and makes the target."""
    texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    samples = [
        Sample(task.short(row), text, task.reference(row), dict(row)) for row, text in zip(rows, texts, strict=True)
    ]
    return torch.tensor([sum(scores) for scores in zip(*(reward(samples) for reward in task.rewards), strict=True)])


# ------------------------------------------------------------------------------------------------------------ the loop


def main(iterations: int = ITERATIONS, format: str = "fp8_tensor") -> list[float]:
    """Train; return the greedy accuracy of the sampler before and after."""
    torch.manual_seed(0)
    disable_progress_bar()
    folder, task = shipped(MODEL), Countdown()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    learner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # no dropout, as the sampler has
    sampler = low_bit_copy(learner, formats.get(format))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=RATE, weight_decay=0.01)
    training, held_out = itertools.cycle(task.train_rows()), list(itertools.islice(task.evaluation_rows(), 200))

    def accuracy() -> float:
        publish(learner, sampler)
        _, drawn, _ = draw(sampler, tokenizer, [task.short(row) for row in held_out], greedy=True)
        return float((rewards_of(task, held_out, tokenizer, drawn) >= 1).float().mean())

    accuracies = [accuracy()]
    print(f"greedy accuracy before: {accuracies[0]:.3f}\n\n iteration  reward  kl(sampler|learner)    ess  alpha")
    for iteration in range(1, iterations + 1):
        # x ~ D, y ~ π_sampler(· | x): G completions of each prompt, and their rewards
        publish(learner, sampler)
        rows = [row for row in itertools.islice(training, PROMPTS) for _ in range(GROUP)]
        asked, drawn, sampled = draw(sampler, tokenizer, [task.short(row) for row in rows])
        mask = counted(drawn, tokenizer.eos_token_id)
        rewards = rewards_of(task, rows, tokenizer, drawn)

        # A = R − mean of its group (AIS eq. 3)
        advantages = group_advantages(rewards, GROUP, "none")

        # d = log π_learner − log π_sampler; α from ESS, d and the variance of the weighted advantages (AIS eqs. 12–17)
        logprobs = score(learner, asked, drawn)
        d = log_ratio(logprobs.detach(), sampled, mask)
        gate = ais_gate(d, mask, advantages)
        weights = ais_weights(d, mask, gate.alpha)  # 1 + α (min(e^d, C) − 1), AIS eq. 18

        # the clipped surrogate, weighed (AIS eq. 19); one update a rollout, so that its ratio is 1
        terms = clipped_surrogate(logprobs, logprobs.detach(), advantages, mask, weights)
        loss = reduce(terms.loss, mask, "sequence", length=TOKENS)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()

        if iteration == 1 or iteration % 10 == 0:
            apart = mismatch_metrics(logprobs.detach(), sampled, mask)
            kl, ess = float(apart["kl_k3"]), float(gate.ess_ratio)
            print(f"{iteration:10d}{float(rewards.mean()):8.3f}{kl:21.5f}{ess:7.3f}{float(gate.alpha):7.3f}")
    accuracies.append(accuracy())
    print(f"\ngreedy accuracy after: {accuracies[1]:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
