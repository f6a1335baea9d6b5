"""Several tasks as one: data sets with columns, prompts and rewards of their own, mixed in training."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_qrl.data.environment import MultiTurnTask
from lit_qrl.data.task import ListedTask, Message, Row, Task
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, RewardProgress, Sample, Score, Scores

log = logging.getLogger(__name__)

SOURCE = "source_task"
"""Column that a mixture adds to its rows: the name of the task that each is from."""


class Mixture(ListedTask):
    """Trains on several tasks at once; each poses, scores and judges its own problems.

    No problem is both trained on and evaluated, across the tasks too. All held-out problems are evaluated as one set;
    list a set under `data.benchmarks` for a figure of its own. A problem counts in the logged means of its own task's
    rewards alone.

    Args:
        tasks: with names that differ.
        weights: how often each is posed, in proportion, at any moment of the run; by default every problem is posed
            equally often.
        name: of the mixture.

    Raises:
        ConfigError: there is no task, two have one name, the weights are not as many positive numbers,
            or a task has several turns; in `setup`,
            what a task of them refuses.
    """

    def __init__(self, tasks: list[Task], weights: list[float] | None = None, name: str = "mixture") -> None:
        names = [task.name for task in tasks]
        if not tasks or len(set(names)) < len(names):
            raise ConfigError(
                "The tasks of a mixture cannot be told apart." if tasks else "A mixture has no task.",
                expected="at least one task, and names that differ",
                given=", ".join(names) or "none",
                remedy="Give each a `name`.",
            )
        for task in tasks:
            if isinstance(task, MultiTurnTask):
                raise ConfigError(
                    f"A mixture cannot hold {task.name!r}, which has several turns.",
                    remedy="Train on it alone, and list the others under data.benchmarks.",
                )
        if weights is not None and (
            len(weights) != len(tasks) or not all(math.isfinite(weight) and weight > 0 for weight in weights)
        ):
            raise ConfigError(
                "The weights of a mixture do not fit its tasks.",
                expected=f"{len(tasks)} positive numbers",
                given=weights,
                remedy="Give each task one, or leave weights out.",
            )
        self.tasks, self.name = dict(zip(names, tasks, strict=True)), name
        self.weights: Mapping[str, float] = dict(zip(names, weights, strict=True)) if weights is not None else {}
        super().__init__()

    @property
    def rewards(self) -> Sequence[Reward]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The rewards of all tasks; `score` gives each the samples of its own."""
        return [reward for task in self.tasks.values() for reward in task.rewards]

    def setup(self) -> None:
        if self._train or self._evaluation:
            return
        for task in self.tasks.values():
            task.setup()
        named = self.tasks.items()
        evaluation = [{**row, SOURCE: name} for name, task in named for row in task.evaluation_rows()]
        train = [{**row, SOURCE: name} for name, task in named for row in task.train_rows()]
        evaluated = {self.key(row) for row in evaluation}
        kept = [row for row in train if self.key(row) not in evaluated]
        if len(kept) < len(train):
            log.info(
                "Removed %d of %d training rows that another task evaluates on.", len(train) - len(kept), len(train)
            )
        self._train, self._evaluation = kept, evaluation

    def source(self, row: Row) -> str:
        return row[SOURCE]

    def prompt(self, row: Row) -> str | list[Message]:
        return self.tasks[row[SOURCE]].prompt(row)

    def reference(self, row: Row) -> Any:
        return self.tasks[row[SOURCE]].reference(row)

    def key(self, row: Row) -> str:
        return self.tasks[row[SOURCE]].key(row)

    def is_correct(self, samples: Sequence[Sample]) -> list[bool]:
        correct = [False] * len(samples)
        for positions, found in self._by_task(samples, lambda task, own: task.is_correct(own)):
            for position, one in zip(positions, found, strict=True):
                correct[position] = one
        return correct

    def score(
        self,
        samples: Sequence[Sample],
        error_reward: Score = 0.0,
        group_size: int = 1,
        progress: RewardProgress | None = None,
    ) -> Scores:
        total: list[Score] = [0.0] * len(samples)
        parts: dict[str, list[Score]] = {reward.name: [None] * len(samples) for reward in self.rewards}
        errors = 0
        for positions, scores in self._by_task(
            samples, lambda task, own: task.score(own, error_reward, group_size, progress)
        ):
            errors += scores.errors
            for i, position in enumerate(positions):
                total[position] = scores.total[i]
                for name, values in scores.parts.items():
                    parts[name][position] = values[i]
        return Scores(total, parts, errors)

    def _by_task(self, samples: Sequence[Sample], judge: Callable[[Task, list[Sample]], Any]) -> list[tuple[Any, Any]]:
        """Return for each task that has some of the samples their positions, and what it says of them."""
        places: dict[str, list[int]] = {}
        for position, sample in enumerate(samples):
            places.setdefault(sample.columns[SOURCE], []).append(position)
        return [(at, judge(self.tasks[name], [samples[i] for i in at])) for name, at in places.items()]

    def close(self) -> None:
        for task in self.tasks.values():
            task.close()
