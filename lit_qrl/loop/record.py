"""Where weights in flight met the engine: what a run writes down of it, so that another can follow it.

What an engine is at between two of its steps follows from the steps that it has done since a rollout began, and from
the weights that came on the way, since all requests of a rollout are given at once and its slots are filled in order.
So of every publish, and of every time that it stands still to score, the rollout and the steps done of it are enough;
and of the learner how many rollouts it began ahead, which hangs on what had been drawn. `flight.jsonl` has a line for
each iteration, and one before them for each process that went on with the run.
"""

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_qrl.loop.drafts import Draft, versions_of
from lit_qrl.loop.hooks import Learner, rl_callbacks
from lit_qrl.optim.build import described_optimizer
from lit_qrl.rollout.pauses import Stand
from lit_qrl.rollout.vllm.installation import versions
from lit_qrl.run.config import flat
from lit_qrl.run.description import Described, describe
from lit_qrl.run.event_log import FLIGHT_FILE, append_jsonl, plain
from lit_qrl.seeding import derive_seed

ELSEWHERE = (
    "data.replay",
    "data.engine.devices",
    "data.engine.hosts",
    "data.engine.token_file",
    "data.engine.transfer",
)
"""Settings that say where a run draws, not what."""
OF_TRAINER = (
    *("max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "check_val_every_n_epoch"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
)
"""Settings that a Trainer has by their names and that change what is learned, or when an engine is asked."""


class FlightRecord:
    """Writes a line for each iteration, once its rollout is there.

    Args:
        settings: of the run, by their keys.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self._of_seed: dict[int | None, int] = {None: 0}
        self._row: dict[str, Any] = {}
        self.begun = False
        """True once it has its first line."""

    def name(self, seed: int, iteration: int) -> None:
        """Note the seed of an iteration's rollout, by which engines name it."""
        self._of_seed[seed] = iteration + 1

    def stood(self, why: str, stands: Sequence[Stand]) -> None:
        """Note where the engines stood still, to take weights (`publish`) or to score (`score`)."""
        self._row[why] = [[self._of_seed[one.rollout], one.steps] for one in stands]

    def died(self) -> None:
        """Note that an engine died: what it had under way is drawn again, which nobody can follow."""
        self._row["died"] = True

    def begin(self, learner: Learner, kept: Sequence[int]) -> None:
        """Write what comes before the iterations of a process.

        Args:
            learner: whose run it is.
            kept: iterations whose rollouts its checkpoint had.
        """
        self.begun = True
        first = {
            "begins": learner.trainer.current_epoch + 1,
            "kept": [one + 1 for one in kept],
            "engines": learner.data.engine.engines,
            "versions": versions(),
            "settings": self.settings,
        }
        self._write(learner, first)

    def write(self, learner: Learner, depth: int, draft: Draft) -> dict[str, Any]:
        """Write the line of the iteration under way, and return it.

        Args:
            learner: whose run it is.
            depth: rollouts that were begun ahead.
            draft: its rollout.
        """
        iteration, told, self._row = learner.trainer.current_epoch + 1, self._row, {}
        row = {"iteration": iteration, "ahead": depth, **told, "tokens": digest(draft)}
        self._write(learner, row)
        return row

    def _write(self, learner: Learner, row: Mapping[str, Any]) -> None:
        if learner.trainer.world_size == 1:  # each of several would have its own
            append_jsonl(Path(learner.trainer.default_root_dir) / FLIGHT_FILE, [dict(row)])


def rollout_seed(base_seed: int, iteration: int) -> int:
    """Return the seed of an iteration's rollout that is drawn ahead."""
    return derive_seed(base_seed, "rollout", iteration, 0, 0)


def digest(draft: Draft) -> str:
    """Return a sum over the tokens of a rollout and the versions that drew them."""
    total = hashlib.sha256()
    for one in draft.completions or ():
        for numbers in ([len(one.token_ids)], one.token_ids, versions_of(one)):
            total.update(array("q", numbers))
    return total.hexdigest()[:16]


def settings_of(learner: Learner) -> dict[str, Any]:
    """Return what a run learns by, one value per setting under the keys of the command line, as JSON has them."""
    of: Any = learner  # a module, with an optimizer
    trainer = learner.trainer
    module, plugin = describe(learner), trainer.precision_plugin
    described: dict[str, Any] = {
        "seed_everything": int(os.environ.get("PL_GLOBAL_SEED", 0)),
        "model": {**module, "init_args": {**module["init_args"], "optimizer": described_optimizer(of.optimizer)}},
        "data": describe(learner.data),
        "trainer": {name: describe(getattr(trainer, name)) for name in OF_TRAINER},
    }
    described["trainer"]["callbacks"] = [describe(one) for one in rl_callbacks(trainer)]
    described["trainer"]["precision"] = describe(plugin) if isinstance(plugin, Described) else trainer.precision
    return {key: plain(value) for key, value in flat(described).items() if place_of(key) not in ELSEWHERE}


def place_of(key: str) -> str:
    """Return the setting of a list's or a mapping's part.

    >>> place_of("data.engine.hosts"), place_of("data.group_size")
    ('data.engine.hosts', 'data.group_size')
    """
    return next((one for one in ELSEWHERE if key == one or key.startswith(f"{one}.")), key)
