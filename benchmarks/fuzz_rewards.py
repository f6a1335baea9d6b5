"""Judges mutated answers by every reward that ships, and tells of exceptions and of the slowest.

    python benchmarks/fuzz_rewards.py --count 100000 --seed 0

An answer is a right one or a hostile text in which pieces are repeated, cut, swapped, nested, joined with those of
others or replaced by other signs. Ends with status 1 where a reward raised, or took more than 3 s for one answer;
Ctrl-C ends it with what is done.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lit_qrl.rewards import MathReward, Reward, Sample  # noqa: E402
from lit_qrl.rewards.function import FunctionReward  # noqa: E402
from lit_qrl.rewards.puzzles import CountdownReward, SudokuReward  # noqa: E402
from lit_qrl.rewards.simple import ConstantReward, EpisodeReward, ExactMatchReward, FormatReward, boxed_number  # noqa: E402
from lit_qrl.types import Episode  # noqa: E402

EPISODE = Episode(score=0.5, ended="done", turns=1)
LIMIT = 3.0
"""Seconds for one answer."""
BATCH = 64
"""Samples of a call, as of an iteration."""
COLUMNS = {"numbers": [3, 5, 7], "target": 22, "Puzzle": "1200341221434321", "Solution": "1234341221434321"}
GOLDS = [
    "7", "1/2", "-3.5", "28\\%", "x^2+2x+1", "(1,2)", r"\{1,2\}", "1, 1, 2", r"\frac{\sqrt{3}}{2}", "[0,1)", "x=5",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"(-\infty, 1]", r"12 \text{ cm}^2", r"\text{even}", "2^{2005}", "3+4i",
]  # fmt: skip
SEEDS = [
    r"so \boxed{7}", "<answer>1/2</answer>", "#### 42", "Answer: x", "<think>3*5+7</think><answer>3*5+7</answer>",
    "1234 3412 2143 4321", r"\boxed{2^3^" + "9" * 350 + "}", "9**9**9**9", "(" * 60, "{" * 60, "\\", "\x00", "\ud800",
    r"\frac{1}{0}", "1e999999999", "!" * 9, r"\pm" * 9, r"\cup" * 9, r"\text{", "__import__('os').system('exit')",
    "a" * 60 + "b", "1,234,567.89", "5!" * 5, r"\sqrt[3]{", r"\begin{cases}", "&\\\\", "$$", "^_{", "|x|", "x \\in",
    r"\lim_{x \to 0}", r"\int_0^1", r"\sum_{n=1}^{\infty}", "\n\n", " " * 40, "or", "and", ";", ":", "<=", "=", "..",
    "٣", "½²√π", "0x1F", "--",
]  # fmt: skip
NESTS = ("({})", "{{{}}}", r"\frac{{{}}}{{{}}}", "{}^{{{}}}", r"\left({}\right)!", r"\sqrt{{{}}}", "{}_{{{}}}")
WRAPS = ("{}", r"\boxed{{{}}}", "<answer>{}</answer>", "Answer: {}", "#### {}", r"\boxed{{{}}} and \boxed{{1}}")
MOST = 4000
"""Characters of an answer, which are cut off beyond; a tenth has 25 times as many."""


def rewards() -> list[Reward]:
    """Return every reward that ships, its other ways to read an answer too."""
    return [
        MathReward(workers=4),
        MathReward(last_number=True, skip_thinking=True, decimal_comma=True, name="math, all options"),
        CountdownReward(partial=0.1),
        SudokuReward(),
        FormatReward(),
        FormatReward(pattern=r"(a|b)+\d*.*", name="pattern"),
        ExactMatchReward(),
        EpisodeReward(),
        ConstantReward(0.5),
        FunctionReward(boxed_number),
    ]


def mutated(random: random.Random) -> str:
    """Return a hostile text."""
    pieces = GOLDS + SEEDS
    text = random.choice(pieces)
    operations: list[Callable[[str], str]] = [
        lambda text: text + random.choice(pieces),
        lambda text: text * random.choice((2, 3, 10, 100)),
        lambda text: text[: random.randrange(len(text) + 1)],
        lambda text: text[::-1],
        lambda text: "".join(random.sample(text, len(text))),
        lambda text: random.choice(("(", "{", "[", r"\sqrt{", r"\frac{", "2^{")) * random.randrange(1, 30) + text,
        lambda text: random.choice(NESTS).format(text, text),
        lambda text: text.replace(random.choice(text or " "), random.choice(pieces)),
        lambda text: "".join(
            chr(random.randrange(0x110000)) if random.random() < 0.1 else character for character in text[:500]
        ),
    ]  # fmt: skip
    for _ in range(random.randrange(5)):
        text = random.choice(operations)(text)[:MOST]
    if random.random() < 0.1:
        text *= 25
    return random.choice(WRAPS).format(text) if random.random() < 0.7 else text


def samples(count: int, seed: int) -> Iterator[list[Sample]]:
    """Yield batches of samples."""
    drawn = random.Random(seed)
    for first in range(0, count, BATCH):
        yield [
            Sample("", mutated(drawn), drawn.choice(GOLDS), {**COLUMNS, "answer": "#### 7"}, EPISODE)
            for _ in range(min(BATCH, count - first))
        ]


def seconds(reward: Reward, batch: Sequence[Sample], told: list[str], again: int = 2) -> float:
    """Return how long a reward took for a batch, or for the slowest of it where that is over the limit.

    A single answer over the limit is judged again, since a busy machine is slow too: the shortest time counts.
    """
    began = time.monotonic()
    try:
        scores = reward(batch)
        wrong = [score for score in scores if not isinstance(score, float) or not 0 <= score <= 1]
        if wrong or len(scores) != len(batch):
            raise ValueError(f"{len(scores)} scores for {len(batch)} samples, {wrong[:1]}")
    except Exception as error:
        if len(batch) > 1:
            return max(seconds(reward, [sample], told) for sample in batch)
        told.append(f"{type(error).__name__}: {str(error)[:200]}: {batch[0].completion[:200]!r}")
    took = time.monotonic() - began
    if took > LIMIT and len(batch) > 1:
        return max(seconds(reward, [sample], told) for sample in batch)
    return min(took, seconds(reward, batch, told, again - 1)) if took > LIMIT and again else took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="answers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found: dict[str, Any] = {reward.name: [reward, [], [], 0] for reward in rewards()}
    plain, other = (one[0] for one in list(found.values())[:2])
    other._judged = plain._judged  # they compare alike what they read
    for reward, *_ in found.values():  # worker processes start
        reward([Sample("", r"\boxed{1+x}", "x+1", {**COLUMNS, "answer": "1"}, EPISODE)])
    done, shown = 0, time.monotonic()
    try:
        for batch in samples(args.count, args.seed):
            for one in found.values():
                reward, told, slowest, _ = one
                slowest[:] = [max([*slowest, seconds(reward, batch, told)])]
                one[3] += len(reward.failures)
            done += len(batch)
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(f"{done} of {args.count}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
    print(f"{done} answers, seed {args.seed}, {BATCH} a call\n")
    print("| reward | exceptions | failures | slowest call, or answer where that took over 3 s (s) |")
    print("| --- | --- | --- | --- |")
    for name, (reward, told, slowest, failures) in found.items():
        print(f"| {name} | {len(told)} | {failures} | {slowest[0]:.2f} |")
        reward.close()
    for name, (_, told, _, _) in found.items():
        for text in told[:10]:
            print(f"{name}: {text}")
    sys.exit(any(told or slowest[0] > LIMIT for _, told, slowest, _ in found.values()))


if __name__ == "__main__":
    main()
