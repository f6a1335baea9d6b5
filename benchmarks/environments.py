"""Rollout tokens per second of a task of several turns against one of a single turn, at equal tokens drawn.

Both draw from the shipped policy's shape with random weights, which never stops on its own: one answer of `--tokens`,
or `--turns` answers that share them, each after a message of the environment. Tokens that the environment says are
not counted. The second rate of each is per second of processor time, which other work on the machine disturbs less.

    python benchmarks/environments.py --turns 2 --tokens 64
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lit_qrl.data.environment import MultiTurnTask
from lit_qrl.loop.turns import Conversations
from lit_qrl.network.adapters import merged_weights
from lit_qrl.network.stream import weight_stream
from lit_qrl.rollout import TransformersEngine
from lit_qrl.rollout.engine import Converses, RolloutEngine, SamplerSpec
from lit_qrl.types import SamplingParams

MESSAGE = list(range(4, 12))


class Talker(MultiTurnTask):
    """Says one message after each answer until its turns are used up."""

    name = "talker"

    def train_rows(self) -> Sequence[Any]:
        return [{}]

    evaluation_rows = train_rows

    def prompt(self, row: Any) -> str:
        return ""

    def start(self, row: Any) -> list[str]:
        return []

    def reply(self, state: list[str], answer: str) -> str | None:
        state.append(answer)
        return "go on" if len(state) < self.max_turns else None

    def finish(self, state: list[str]) -> float:
        return float(len(state))


class Shared:
    """The turns of a dialogue, each of an equal share of the tokens, and never ended by the policy."""

    def __init__(self, talks: Conversations, tokens: int) -> None:
        self.talks, self.tokens = talks, tokens

    @property
    def open(self) -> bool:
        return self.talks.open

    def waiting(self, wait: Any) -> list[Any]:
        return [replace(turn, max_tokens=min(turn.max_tokens, self.tokens)) for turn in self.talks.waiting(wait)]

    def has_ended(self, index: int) -> bool:
        return self.talks.has_ended(index)

    def answered(self, turn: Any, completion: Any) -> None:
        completion.finish_reason = "stop"
        self.talks.answered(turn, completion)


def engine_of(name: str, network: Any, sampling: SamplingParams) -> RolloutEngine:
    """Return an engine with the network's weights."""
    if name == "vllm":
        from lit_qrl.rollout.vllm.engine import VLLMEngine

        engine: RolloutEngine = VLLMEngine()
    else:
        engine = TransformersEngine()
    spec = SamplerSpec(sampling=sampling, prompt_limit=64)
    engine.setup(spec, SimpleNamespace(network=network))
    engine.load_weights(weight_stream(merged_weights(network), None, ()), None, 0)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-countdown")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="drawn in one conversation")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model), dtype=torch.float32).eval()
    said = (options.turns - 1) * len(MESSAGE)
    sampling = SamplingParams(max_tokens=options.tokens + said, ignore_stop=True)
    engine = engine_of(options.engine, network, sampling)
    assert isinstance(engine, Converses)
    prompts = [[4 + (i * 7 + j) % 20 for j in range(16)] for i in range(options.prompts)]
    drawn = options.prompts * options.group * options.tokens
    task = Talker(max_turns=options.turns)

    def single(seed: int) -> int:
        completions = engine.generate(
            prompts, options.group, seed, None, SamplingParams(max_tokens=options.tokens, ignore_stop=True)
        )
        return sum(len(one.token_ids) for one in completions)

    def several(seed: int) -> int:
        starts = [prompt for prompt in prompts for _ in range(options.group)]
        with Conversations(
            task, [{}] * len(starts), starts, lambda _: MESSAGE, str, options.tokens + said, seed
        ) as talks:
            engine.converse(Shared(talks, options.tokens // options.turns), sampling)
        return sum(sum(one.drawn or ()) for one in talks.completions())

    rates: dict[str, list[tuple[float, float]]] = {"one turn": [], f"{options.turns} turns": []}
    for repeat in range(options.repeats + 1):
        for name, draw in zip(rates, (single, several), strict=True):
            start, busy = time.perf_counter(), time.process_time()
            count = draw(repeat)
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
            assert count == drawn, (name, count, drawn)
            print(f"{name:>8}: {count / seconds:8.0f} tokens/s{'' if repeat else ', warming up'}", flush=True)
            if repeat:  # the first warms up
                rates[name].append((count / seconds, count / busy))
    medians = {name: [statistics.median(kind) for kind in zip(*pairs, strict=True)] for name, pairs in rates.items()}
    for name, (wall, busy) in medians.items():
        print(f"{name:>8}, median: {wall:8.0f} tokens/s, {busy:8.0f} per second of processor time")
    one, more = medians.values()
    print(f"   ratio: {more[0] / one[0]:.2f}, of processor time {more[1] / one[1]:.2f}")
    engine.close()


if __name__ == "__main__":
    main()
