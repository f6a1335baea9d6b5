"""SIGTERM to a run of two processes, wherever each is: both stop at the same place, and the run goes on as if whole."""

import inspect
import os
import signal
import time
from unittest import mock

import pytest
import torch

from lit_qrl.callbacks import RLCallback
from lit_qrl.run.interrupt import InterruptedTogether
from tests.test_processes import FIRST, RUNS, assert_close, learn
from tests.tiny_run import model_folder
from tests.two_processes import RANKS, in_two, join

ITERATIONS = 4
OPTIONS = RUNS[FIRST]
PLACES = {"publish": 2, "draw": 2, "rollout": 2, "update": 3, "save": 3, "evaluate": 3}
"""How many iterations are behind the checkpoint, of a signal in the third."""


class Signalled(RLCallback):
    """Sends SIGTERM to processes of the third iteration in the middle of something."""

    def __init__(self, place, ranks):
        self.place, self.ranks = place, ranks

    def _send(self, trainer, place):
        if place == self.place and trainer.current_epoch == 2 and trainer.global_rank in self.ranks:
            self.ranks = ()  # one each
            os.kill(os.getpid(), signal.SIGTERM)

    def on_publish(self, trainer, module, name, tensor):
        self._send(trainer, "publish")
        return tensor

    def on_rollout_start(self, trainer, module, version):
        if self.place == "draw" and trainer.current_epoch == 2:
            self._draw_for_ever(trainer)

    def on_validation_start(self, trainer, pl_module):
        if self.place == "evaluate" and trainer.current_epoch == 2:
            self._draw_for_ever(trainer)

    def _draw_for_ever(self, trainer):
        """Let no process come to the end of what it draws, whichever got the signal."""

        def generate(*given, **more):
            self._send(trainer, self.place)
            while True:
                time.sleep(60)

        trainer.datamodule.engine.generate = generate

    def on_generation_end(self, trainer, module):
        self._send(trainer, "rollout")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._send(trainer, "update")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self._send(trainer, "save")


def told(place, ranks, folder):
    """Return what the run ended by, and whether a collective was called in a handler."""
    broadcasts, real = [], torch.distributed.broadcast
    trainer = {"limit_val_batches": 1.0} if place == "evaluate" else {}
    options = lambda: {  # noqa: E731
        **OPTIONS(),
        "callbacks": [*OPTIONS()["callbacks"], Signalled(place, ranks)],
        "trainer": {**OPTIONS().get("trainer", {}), **trainer},
    }

    def seen(*args, **kwargs):
        broadcasts.extend(frame.function for frame in inspect.stack() if frame.function == "_sigterm_notifier_fn")
        return real(*args, **kwargs)

    with mock.patch.object(torch.distributed, "broadcast", seen):
        try:
            learn(folder, RANKS, ITERATIONS, options=options)
        except InterruptedTogether as ended:
            return ended.code, broadcasts
    return None


def all_places(rank, ports, folder):
    found = {}
    for place in PLACES:
        for ranks in ((0,), (1,), (0, 1)):
            name = f"{place}{''.join(map(str, ranks))}"
            join(rank, ports)
            found[name] = told(place, ranks, folder / name)
            torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    for place in PLACES:
        for ranks in ("0", "1", "01"):
            model_folder(folder / f"{place}{ranks}" / "model")
    return folder, in_two(all_places, folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return learn(tmp_path_factory.mktemp("unbroken"), 1, ITERATIONS, options=OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["0", "1", "01"])
@pytest.mark.parametrize("place", PLACES)
def test_all_processes_stop_at_one_place_and_the_run_goes_on(place, ranks, stopped, unbroken):
    folder, ended = stopped
    assert [rank[f"{place}{ranks}"] for rank in ended] == [(143, [])] * RANKS
    last = folder / f"{place}{ranks}" / "run" / "checkpoints" / "last.ckpt"
    held = torch.load(last, weights_only=True)
    assert held["global_step"] == PLACES[place] * 4  # two passes of two mini-batches
    went_on = learn(folder / f"{place}{ranks}", 1, ITERATIONS, ckpt_path=last, options=OPTIONS)
    assert_close(went_on["weights"], unbroken["weights"], "weights of")
