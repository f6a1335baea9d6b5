"""The procedural tasks of the library reasoning-gym, with their difficulty levels."""

import importlib
import random
from collections.abc import Sequence
from typing import Any

from lit_qrl.data.task import ListedTask, Message, Row
from lit_qrl.errors import ConfigError, nearest
from lit_qrl.rewards.base import Reward, Sample, check_names
from lit_qrl.rewards.math.reward import last_tagged


class ReasoningGymReward(Reward):
    """Returns the library's own score, in [0, 1], of the text in the last `<answer>` tags, or of the whole completion.

    Args:
        tags: the answer stands between `<answer>` and `</answer>`; else it is the whole completion.
        weight: factor in the sum of rewards.
        name: of the metric.
    """

    def __init__(self, tags: bool = False, weight: float = 1.0, name: str = "reasoning_gym") -> None:
        self.tags, self.weight, self.name = tags, weight, name

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        library = _library()
        return [self._score(library, sample) for sample in samples]

    def _score(self, library: Any, sample: Sample) -> float:
        answer = last_tagged(sample.completion) if self.tags else sample.completion
        entry = sample.columns
        score = library.get_score_answer_fn(entry["metadata"]["source_dataset"])
        return float(score(answer=answer and answer.strip(), entry=entry))


class ReasoningGym(ListedTask):
    """Problems of one or more of reasoning-gym's tasks; needs `pip install lit-qrl[environments]`.

    Problems are drawn from the seed; no held-out question is trained on.

    Args:
        task: name of a task, such as `chain_sum`, or several.
        config: arguments of the task's own config, such as `{min_terms: 2}`; with several tasks, of each by its name.
        levels: difficulty levels of the task's curriculum, from 0, in the order of training: each gets an equal share
            of the iterations' prompts; the last is evaluated on. None takes `config` alone.
        train_size: problems to train on.
        evaluation_size: held-out problems.
        prompt: the problem as a text, a template of the entry's fields, such as `{metadata[expression]}=`; by default a
            chat message with the question.
        tags: ask for the answer between `<answer>` tags, and read it there; by default for chat alone.
        rewards: what is learned from; by default the library's score, which also decides what counts as correct.
        seed: of the problems.

    Raises:
        ConfigError: the library is not installed, a task, level or argument is unknown, or there are too few problems.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        task: str | list[str],
        config: dict[str, Any] | None = None,
        levels: list[int] | None = None,
        train_size: int = 8192,
        evaluation_size: int = 500,
        prompt: str | None = None,
        tags: bool | None = None,
        rewards: list[Reward] | None = None,
        seed: int = 0,
    ) -> None:
        self.tasks, self.config, self.levels = [task] if isinstance(task, str) else list(task), config or {}, levels
        self.check_sizes(train_size=train_size, evaluation_size=evaluation_size)
        self.train_size, self.evaluation_size, self.seed = train_size, evaluation_size, seed
        self.template = prompt
        self.tags = prompt is None if tags is None else tags
        super().__init__()
        self.judge = ReasoningGymReward(self.tags)
        self.rewards = [self.judge] if rewards is None else list(rewards)
        self.in_order = levels is not None
        check_names(self.rewards)

    def setup(self) -> None:
        if self._train:
            return
        levels = self.levels or [None]
        self._evaluation = self._draw(levels[-1], self.evaluation_size, "evaluation", set())
        held_out = {row["question"] for row in self._evaluation}
        train: list[Row] = []
        for index, level in enumerate(levels):
            first, last = (self.train_size * i // len(levels) for i in (index, index + 1))
            train += self._draw(level, last - first, f"train {index}", held_out)
        self._train = train

    def _draw(self, level: int | None, size: int, side: str, held_out: set[str]) -> list[Row]:
        """Return problems of all tasks by turns; questions may repeat in training, as the library draws them."""
        seeds = random.Random(f"reasoning_gym {self.seed} {side}")
        streams = [self._stream(name, level, size, seeds.randrange(2**31), held_out, side) for name in self.tasks]
        return [streams[i % len(streams)][i // len(streams)] for i in range(size)]

    def _stream(self, name: str, level: int | None, size: int, seed: int, held_out: set[str], side: str) -> list[Row]:
        dataset = self._dataset(name, level, seed, 4 * size + 64)
        rows: list[Row] = []
        seen: set[str] = set()
        for index in range(4 * size + 64):
            if len(rows) == size:
                return rows
            entry = dataset[index]
            if entry["question"] not in held_out and (side != "evaluation" or entry["question"] not in seen):
                seen.add(entry["question"])
                rows.append(entry)
        raise ConfigError(
            f"reasoning-gym's {name} has too few different problems for the {side.split()[0]} side.",
            expected=f"at most about {len(rows)}",
            given=size,
            remedy="Lower evaluation_size, or widen data.task.config.",
        )

    def _dataset(self, name: str, level: int | None, seed: int, size: int) -> Any:
        library, factory = _library(), importlib.import_module("reasoning_gym.factory")
        if name not in factory.DATASETS:
            raise ConfigError(
                "reasoning-gym has no such task.", given=name, remedy=nearest(name, sorted(factory.DATASETS))
            )
        config = self.config.get(name, {}) if len(self.tasks) > 1 else dict(self.config)
        if level is not None:
            config = {**self._at_level(factory, name, level), **config}
        try:
            return library.create_dataset(name, **{**config, "seed": seed, "size": size})
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"reasoning-gym's {name} does not take its config: {str(error).rstrip('.')}.",
                given=config or None,
                remedy="Its config class in reasoning_gym lists the arguments.",
            ) from error

    def _at_level(self, factory: Any, name: str, level: int) -> dict[str, Any]:
        if name not in factory.CURRICULA:
            raise ConfigError(f"reasoning-gym's {name} has no levels.", remedy="Remove data.task.levels, use config.")
        curriculum = factory.create_curriculum(name)
        highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
        if not 0 <= level <= highest:
            raise ConfigError(f"reasoning-gym's {name} has no such level.", expected=f"0 to {highest}", given=level)
        for attribute in curriculum.attributes.values():
            curriculum.set_attr_level(attribute.name, min(level, len(attribute.levels) - 1))
        return {k: v for k, v in vars(curriculum.generate_configuration()).items() if k not in ("seed", "size")}

    def prompt(self, row: Row) -> str | list[Message]:
        if self.template is None:
            ask = " Put the final answer between <answer> and </answer>." if self.tags else ""
            return [{"role": "user", "content": row["question"] + ask}]
        try:
            return self.template.format(**row)
        except (KeyError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"data.task.prompt names a field that a problem of {row['metadata']['source_dataset']} lacks: {error}.",
                expected=f"question, answer, or metadata[…] with one of {', '.join(row['metadata'])}",
                given=self.template,
            ) from error

    def reference(self, row: Row) -> Any:
        """Return the library's own answer; others may be right too."""
        return row["answer"]


def _library() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "ReasoningGym needs the library reasoning-gym.",
            given=str(error),
            remedy="pip install 'lit-qrl[environments]', or reasoning-gym alone.",
        ) from error
