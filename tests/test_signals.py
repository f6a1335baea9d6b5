"""SIGTERM to a run of two processes, wherever each is: both stop at the same place, and the run goes on as if whole."""

import inspect
import os
import signal
import time
from unittest import mock

import pytest
import torch

from lit_qrl.run.interrupt import InterruptedTogether
from tests.test_processes import FIRST, RUNS, assert_close, learn
from tests.tiny_run import calling, model_folder
from tests.two_processes import RANKS, in_two, join

ITERATIONS = 4
OPTIONS = RUNS[FIRST]
PLACES = {
    "publish": ("on_publish", 2),
    "draw": ("on_rollout_start", 2),
    "rollout": ("on_generation_end", 2),
    "update": ("on_train_batch_end", 3),
    "save": ("on_save_checkpoint", 3),
    "evaluate": ("on_validation_start", 3),
}
"""The hook, and how many iterations are behind the checkpoint, of a signal in the third."""


def signalled(place, ranks):
    """A callback that sends SIGTERM to processes of the third iteration in the middle of something."""
    waiting = {*ranks}

    def send(trainer):
        if trainer.current_epoch == 2 and trainer.global_rank in waiting:
            waiting.clear()  # one each
            os.kill(os.getpid(), signal.SIGTERM)

    def draw_for_ever(trainer):
        """Let no process come to the end of what it draws, whichever got the signal."""

        def generate(*given, **more):
            send(trainer)
            while True:
                time.sleep(60)

        if trainer.current_epoch == 2:
            trainer.datamodule.engine.generate = generate

    def hook(trainer, module, *given):
        (draw_for_ever if place in ("draw", "evaluate") else send)(trainer)
        return given[-1] if given else None

    return calling(**{PLACES[place][0]: hook})


def told(place, ranks, folder):
    """Return what the run ended by, and whether a collective was called in a handler."""
    broadcasts, real = [], torch.distributed.broadcast
    trainer = {"limit_val_batches": 1.0} if place == "evaluate" else {}
    options = lambda: {  # noqa: E731
        **OPTIONS(),
        "callbacks": [*OPTIONS()["callbacks"], signalled(place, ranks)],
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
    assert held["global_step"] == PLACES[place][1] * 4  # two passes of two mini-batches
    went_on = learn(folder / f"{place}{ranks}", 1, ITERATIONS, ckpt_path=last, options=OPTIONS)
    assert_close(went_on["weights"], unbroken["weights"], "weights of")
