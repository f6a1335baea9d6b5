"""The reward for a right answer to a mathematical question."""

import os
import re
from collections.abc import Sequence
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.math.answers import after_thinking, extract_answer, refuse
from lit_qrl.rewards.math.equivalence import settled
from lit_qrl.rewards.math.normalize import normalize, with_decimal_points
from lit_qrl.rewards.workers import Failure, WorkerPool, WorkerStartError

CACHE_SIZE = 16_384
"""Judged pairs that are remembered: the completions of a group often agree, and so do epochs."""
MAX_WORKERS = 4
"""By default; most answers are settled without a worker."""


class MathReward(Reward):
    r"""Scores 1 for an answer equivalent to the reference, else 0.

    The answer is the inside of the last `<answer>…</answer>`, else of the last `\boxed{…}` (of several that stand side
    by side, as in `\boxed{1} and \boxed{2}`, all of them), else the number after a last `####`. The reference may be a
    whole solution, from which the answer is read in the same way. Equal numbers are recognized at once; all else goes
    to math-verify in a worker process, which is killed when it is late: that sample scores 0 and stands in `failures`.
    Inputs made to be slow (power towers, huge numbers, deep nesting) score 0 without being tried.

    Args:
        weight: factor in the sum of rewards.
        last_number: without tags, box or mark, take the last number of the completion.
        skip_thinking: read the answer after `</think>` alone; thinking that does not end has none.
        decimal_comma: read `1,5` as one and a half, in answers and references; a list is then `1; 5` or `1, 5`.
        timeout: seconds for one comparison.
        workers: processes for comparisons, started when first needed; 0 takes one per CPU core, at most 4.
        name: of the metric.

    Raises:
        ConfigError: `timeout` is not positive or `workers` is negative.

    >>> MathReward()([Sample("", r"so \boxed{0.5}", "1/2"), Sample("", r"\boxed{2}", "1/2"), Sample("", "1/2", "1/2")])
    [1.0, 0.0, 0.0]
    """

    time_limit = None  # each comparison has its own
    overlaps = True

    def __init__(
        self,
        weight: float = 1.0,
        last_number: bool = False,
        skip_thinking: bool = False,
        decimal_comma: bool = False,
        timeout: float = 2.0,
        workers: int = 0,
        name: str = "math",
    ) -> None:
        if timeout <= 0:
            raise ConfigError("MathReward.timeout must be positive.", expected="seconds", given=timeout)
        if workers < 0:
            raise ConfigError("MathReward.workers is negative.", expected="a number of processes, or 0", given=workers)
        self.weight, self.name, self.last_number = weight, name, last_number
        self.skip_thinking, self.decimal_comma = skip_thinking, decimal_comma
        self.timeout, self.workers = timeout, workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self.failures = {}
        self._pool = WorkerPool("lit_qrl.rewards.math.equivalence:equivalent", self.workers, timeout)
        self._judged: dict[tuple[str, str], bool] = {}

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        scores = [0.0] * len(samples)
        failures: dict[int, str] = {}
        hard: dict[tuple[str, str], list[int]] = {}
        for i, sample in enumerate(samples):
            golds = self._golds(sample.reference)
            answer = self._answer(sample)
            if not answer:
                continue
            for gold in golds:
                judged = quick_verdict(gold, answer)
                if judged is None:
                    judged = self._judged.get((gold, answer))
                if judged is None:
                    hard.setdefault((gold, answer), []).append(i)
                elif judged:
                    scores[i] = 1.0
                    break
        # Where one of several references has matched already, the others need no judgement.
        open_pairs = [pair for pair, positions in hard.items() if any(scores[i] == 0 for i in positions)]
        for pair, verdict in zip(open_pairs, self._verdicts(open_pairs), strict=True):
            if isinstance(verdict, Failure):
                failures.update(dict.fromkeys(hard[pair], f"{verdict.reason}: {pair[1][:80]!r}"))
                continue
            if len(self._judged) >= CACHE_SIZE:
                self._judged.clear()
            self._judged[pair] = verdict
            if verdict:
                for i in hard[pair]:
                    scores[i] = 1.0
        self.failures = {i: why for i, why in failures.items() if scores[i] == 0}
        return scores

    def _answer(self, sample: Sample) -> str | None:
        text = after_thinking(sample.completion, sample.prompt) if self.skip_thinking else sample.completion
        answer = extract_answer(text, self.last_number)
        return with_decimal_points(answer) if answer and self.decimal_comma else answer

    def _golds(self, reference: Any) -> list[str]:
        golds = gold_answers(reference)
        return [with_decimal_points(gold) for gold in golds] if self.decimal_comma else golds

    def unscorable(self, sample: Sample) -> str | None:
        """Return why no completion of a row could score, or None: its gold answer is missing or cannot be read."""
        try:
            golds = self._golds(sample.reference)
        except ValueError as error:
            return str(error)
        problems = [unreadable(gold) for gold in golds]
        return "its list of answers is empty" if not golds else problems[0] if all(problems) else None

    def _verdicts(self, pairs: list[tuple[str, str]]) -> list[bool | Failure]:
        try:
            return self._pool.map(pairs)
        except WorkerStartError as error:
            raise ConfigError(
                f"MathReward {self.name!r} cannot judge answers.",
                expected="worker processes with math-verify",
                given=error,
                remedy="Reinstall lit-qrl's dependencies, or free memory and processes.",
            ) from error

    def close(self) -> None:
        """Kill the workers; a later call starts new ones."""
        self._pool.close()


def gold_answers(reference: Any) -> list[str]:
    r"""Return the answers that count as right: of a list each entry, of a solution text what it marks as its answer.

    >>> gold_answers("2 + 2 = 4\n#### 4"), gold_answers(27.0), gold_answers(["1/2", "0.5"])
    (['4'], ['27.0'], ['1/2', '0.5'])
    """
    if isinstance(reference, (list, tuple)):
        return [answer for entry in reference for answer in gold_answers(entry)]
    if reference is None or not str(reference).strip():
        raise ValueError(
            f"MathReward needs a reference for every sample. Expected: a gold answer. Given: {reference!r}. "
            "Name the column of the answers in the task."
        )
    text = str(reference)
    return [extract_answer(text) or text.strip()]


_SENTENCES = re.compile(r"[a-z)\d}$][.!?]\s+[A-Z][a-z]|\n\s*\n")


def unreadable(gold: str) -> str | None:
    r"""Return why a gold answer scores 0 even against itself, or is a text from which no answer can be read, or None.

    >>> unreadable(r"\frac{1}{2"), unreadable("She has 3. Then she buys 4."), unreadable(r"x \in (1,2]")
    ('its brackets do not match', 'it is a text that marks no answer', None)
    """
    if reason := refuse(gold):
        return reason
    boxed = extract_answer(rf"\boxed{{{gold}}}")
    if boxed is None or not quick_verdict(gold, boxed):
        return "its brackets do not match"
    if not normalize(gold):
        return "nothing is left of it without layout"
    return "it is a text that marks no answer" if _SENTENCES.search(gold) else None


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Return whether an answer is right where that is clear without algebra, else None.

    >>> quick_verdict("72", "72.0"), quick_verdict("7", "9**9**9**9"), quick_verdict("x+1", "1+x")
    (True, False, None)
    """
    if gold == answer:
        return True
    return False if refuse(answer) or refuse(gold) else settled(gold, answer)
