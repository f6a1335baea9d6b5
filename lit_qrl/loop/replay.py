"""A run that follows another's record: each weight update meets the engine at the step at which it met it there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_qrl.errors import ConfigError, listed
from lit_qrl.loop.record import rollout_seed
from lit_qrl.rollout.pauses import Stand
from lit_qrl.rollout.vllm.installation import versions
from lit_qrl.run.event_log import FLIGHT_FILE, read_jsonl
from lit_qrl.run.folder import is_run, meant


@dataclass
class Stretch:
    """What one process did of a run, as far as the next one that went on did not do it again.

    Args:
        first: what it wrote before its first iteration.
        rows: of its iterations, by their numbers from 0.
    """

    first: dict[str, Any]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def begins(self) -> int:
        """Its first iteration, from 0."""
        return self.first["begins"] - 1

    @property
    def kept(self) -> list[int]:
        """Iterations whose rollouts were in its checkpoint."""
        return [one - 1 for one in self.first["kept"]]


class Replay:
    """The record that a run follows.

    Args:
        folder: of the run that wrote it.

    Raises:
        ConfigError: for a folder without a record.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.stretches = stretches_of(read_jsonl(self.folder / FLIGHT_FILE))
        if not self.stretches:
            raise ConfigError(
                "data.replay names a folder without the record of a run whose weights came in flight.",
                expected=f"a run folder with {FLIGHT_FILE}",
                given=folder,
                remedy="That run had none in flight." if is_run(self.folder) else meant(self.folder),
            )
        self.end = end_of(self.stretches)
        """Iterations that can be followed."""
        self.under_way = self._told = False

    # ------------------------------------------------------------------------------------------------------- refusals

    def check(self, settings: Mapping[str, Any], processes: int) -> None:
        """Raise `ConfigError` where the record is of another run than this one.

        Args:
            settings: of this run, as `settings_of` returns them.
            processes: of the learner.
        """
        if processes > 1:
            raise ConfigError(
                "data.replay follows a run of one process.", expected="trainer.devices: 1", given=f"{processes}"
            )
        for one in self.stretches:
            former = one.first["settings"]
            keys = sorted(key for key in former.keys() | settings.keys() if former.get(key) != settings.get(key))
            keys = [key for key in keys if not any(key.startswith(f"{above}.") for above in keys)]
            if keys:
                self._refuse(
                    "other settings",
                    listed(
                        (f"{key} {shown(former.get(key))} there and {shown(settings.get(key))} here" for key in keys), 3
                    ),
                    f"Take the configuration of {self.folder / 'config.yaml'}.",
                )
            theirs, ours = one.first["versions"], versions()
            names = [name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)]
            if names:
                self._refuse(
                    "other versions",
                    listed(f"{name} {theirs.get(name)} there and {ours.get(name)} here" for name in sorted(names)),
                    "Install what it ran with.",
                )
        if not self.end:
            why = "an engine died in" if self._died else "it ended in"
            self._refuse("no iteration that can be followed", f"{why} its first", "Replay another run.")

    def check_engines(self, engines: int) -> None:
        """Raise `ConfigError` for another number of engines than drew."""
        for one in self.stretches:
            if one.first["engines"] != engines:
                given = f"{one.first['engines']} there and {engines} here"
                self._refuse("another number of engines", given, "Give data.engine as many devices or hosts.")

    def begin(self, iteration: int, restored: Sequence[int]) -> None:
        """Begin to follow; raise `ConfigError` where this run begins with what the other never had.

        Args:
            iteration: its first, from 0.
            restored: iterations whose rollouts its checkpoint had.
        """
        begun = {one.begins: one.kept for one in self.stretches}
        if iteration >= self.end:
            self._refuse(
                "fewer iterations", f"{self.end} there, and the checkpoint has had {iteration}", "Leave it out."
            )
        if begun.get(iteration) != list(restored):
            first = listed(f"{one + 1} with {iterations(kept)}" for one, kept in begun.items())
            self._refuse(
                "other rollouts under way",
                f"begun before iteration {first} there, and before {iteration + 1} with {iterations(restored)} here",
                "Replay from the beginning, without --ckpt_path.",
            )
        self.under_way = True

    def _refuse(self, what: str, given: str, remedy: str) -> None:
        raise ConfigError(
            f"data.replay: the record of {self.folder} does not fit this run, of which it has {what}.",
            expected="the run that wrote it",
            given=given,
            remedy=remedy,
        )

    # ------------------------------------------------------------------------------------------------------ following

    def stretch(self, iteration: int) -> Stretch:
        """Return what one process did that had an iteration."""
        return max((one for one in self.stretches if one.begins <= iteration), key=lambda one: one.begins)

    def begins(self, iteration: int) -> bool:
        """Return whether a process began with an iteration."""
        return self.stretch(iteration).begins == iteration

    def depth(self, iteration: int) -> int:
        """Return how many rollouts were begun ahead."""
        return self.stretch(iteration).rows[iteration]["ahead"]

    def courses(self, iteration: int, base_seed: int) -> list[list[Stand]]:
        """Return where each engine stood still, in order, from an iteration with which a process began.

        Args:
            iteration: from 0.
            base_seed: of the run.
        """
        one = self.stretch(iteration)
        pauses = [
            row[why]
            for number, row in sorted(one.rows.items())
            if number < self.end
            for why in ("publish", "score")
            if why in row
        ]
        return [[stand(pause[engine], base_seed) for pause in pauses] for engine in range(one.first["engines"])]

    def compare(self, row: Mapping[str, Any]) -> str:
        """Return a sentence at the first iteration whose tokens are not those of the record; else an empty one.

        Args:
            row: that this run wrote.
        """
        iteration = row["iteration"]
        former = self.stretch(iteration - 1).rows[iteration - 1]
        if self._told or former["tokens"] == row["tokens"]:
            return ""
        self._told = True
        return (
            f"The replay left the run that it follows: the tokens of iteration {iteration} are others, or other "
            f"weights drew them. What computes differs."
        )

    def sentence(self, iterations: int | None) -> str:
        """Return what is followed, for the diary.

        Args:
            iterations: of the run, as configured.
        """
        line = f"Follows {self.folder / FLIGHT_FILE}: {self.end} iterations"
        if iterations is None or iterations < 0 or self.end < iterations:
            return f"{line}, after which {'its engine died' if self._died else 'it was cut'} and this run ends."
        return f"{line}."

    @property
    def _died(self) -> bool:
        return any(row.get("died") for one in self.stretches for row in one.rows.values())


def stand(told: Sequence[int | None], base_seed: int) -> Stand:
    """Return what a record says of one engine.

    >>> stand([0, None], 0)
    Stand(rollout=None, steps=None)
    """
    number, steps = told
    return Stand(rollout_seed(base_seed, number - 1) if number else None, steps)


def stretches_of(lines: Sequence[Mapping[str, Any]]) -> list[Stretch]:
    """Return the stretches of a run in order; what a later one did again is left out.

    >>> told = [{"begins": 1}, {"iteration": 1}, {"iteration": 2}, {"begins": 2}, {"iteration": 2, "ahead": 1}]
    >>> [(one.begins, one.rows) for one in stretches_of(told)]
    [(0, {0: {'iteration': 1}}), (1, {1: {'iteration': 2, 'ahead': 1}})]
    """
    found: list[Stretch] = []
    for line in lines:
        if "begins" in line:
            begins = line["begins"] - 1
            found = [one for one in found if one.begins < begins]
            for one in found:
                one.rows = {number: row for number, row in one.rows.items() if number < begins}
            found.append(Stretch(dict(line)))
        elif "iteration" in line and found:
            found[-1].rows[line["iteration"] - 1] = dict(line)
    return found


def end_of(stretches: Sequence[Stretch]) -> int:
    """Return the number of iterations up to the first that is missing, or in which an engine died."""
    rows = {number: row for one in stretches for number, row in one.rows.items()}
    end = stretches[0].begins
    while end in rows and not rows[end].get("died"):
        end += 1
    return end


def iterations(numbers: Sequence[int]) -> str:
    """Return of which iterations rollouts are.

    >>> iterations([]), iterations([0, 1])
    ('no rollout', 'those of 1, 2')
    """
    return f"those of {listed(str(one + 1) for one in numbers)}" if numbers else "no rollout"


def shown(value: Any) -> str:
    """Return a setting as a sentence has it.

    >>> shown(None), shown(4)
    ('nothing', '4')
    """
    return "nothing" if value is None else str(value)
