"""The reward for a right answer to a mathematical question."""

import os
from collections.abc import Sequence
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.math.answers import extract_answer, refuse
from lit_qrl.rewards.math.equivalence import settled
from lit_qrl.rewards.workers import Failure, WorkerPool, WorkerStartError

CACHE_SIZE = 16_384
"""Judged pairs that are remembered: the completions of a group often agree, and so do epochs."""
MAX_WORKERS = 4
"""By default; most answers are settled without a worker."""


class MathReward(Reward):
    r"""Scores 1 for an answer equivalent to the reference, else 0.

    The answer is the inside of the last `<answer>…</answer>`, else of the last `\boxed{…}`, else the number after a
    last `####`. The reference may be a whole solution, from which the answer is read in the same way. Equal numbers
    are recognized at once; all else goes to math-verify in a worker process, which is killed when it is late: that
    sample scores 0 and is listed in `failures`. Inputs made to be slow (power towers, huge numbers, deep nesting)
    score 0 without being tried.

    Args:
        weight: factor in the sum of rewards.
        last_number: without tags, box or mark, take the last number of the completion.
        timeout: seconds for one comparison.
        workers: processes for comparisons, started when first needed; 0 takes one per CPU core, at most 4.
        name: of the metric.

    Raises:
        ConfigError: `timeout` is not positive or `workers` is negative.

    >>> MathReward()([Sample("", r"so \boxed{0.5}", "1/2"), Sample("", r"\boxed{2}", "1/2"), Sample("", "1/2", "1/2")])
    [1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        weight: float = 1.0,
        last_number: bool = False,
        timeout: float = 2.0,
        workers: int = 0,
        name: str = "math",
    ) -> None:
        if timeout <= 0:
            raise ConfigError("MathReward.timeout must be positive.", expected="seconds", given=timeout)
        if workers < 0:
            raise ConfigError("MathReward.workers is negative.", expected="a number of processes, or 0", given=workers)
        self.weight, self.name, self.last_number = weight, name, last_number
        self.timeout, self.workers = timeout, workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self.failures = {}
        self._pool = WorkerPool("lit_qrl.rewards.math.equivalence:equivalent", self.workers, timeout)
        self._judged: dict[tuple[str, str], bool] = {}

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        scores = [0.0] * len(samples)
        failures: dict[int, str] = {}
        hard: dict[tuple[str, str], list[int]] = {}
        for i, sample in enumerate(samples):
            answer = extract_answer(sample.completion, self.last_number)
            if not answer:
                continue
            for gold in gold_answers(sample.reference):
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


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Return whether an answer is right where that is clear without algebra, else None.

    >>> quick_verdict("72", "72.0"), quick_verdict("7", "9**9**9**9"), quick_verdict("x+1", "1+x")
    (True, False, None)
    """
    if gold == answer:
        return True
    return False if refuse(answer) or refuse(gold) else settled(gold, answer)
