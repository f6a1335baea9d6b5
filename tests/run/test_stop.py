from types import SimpleNamespace

import pytest

from lit_qrl.errors import StoppedError
from lit_qrl.run.event_log import read_jsonl
from lit_qrl.run.stop import stop_run


class Saves:
    """A checkpoint callback that only has the method."""

    def save_before_update(self, trainer):
        path = trainer.folder / "checkpoints" / "last.ckpt"
        path.parent.mkdir()
        path.touch()


def trainer(folder, processes=1):
    found = SimpleNamespace(folder=folder, default_root_dir=str(folder), callbacks=[object(), Saves()])
    vars(found).update(is_global_zero=True, current_epoch=6, world_size=processes)
    return found


@pytest.mark.parametrize("save", [True, False])
def test_it_says_which_checkpoint_is_left_and_writes_one_only_where_asked(tmp_path, save):
    cause = RuntimeError("boom")
    with pytest.raises(StoppedError, match="by the guard: It broke") as caught:
        stop_run(trainer(tmp_path), "engine_died", "It broke.", save=save, error=cause)
    expected = f"The last good checkpoint is {tmp_path / 'checkpoints' / 'last.ckpt'}." if save else "No checkpoint had"
    assert expected in str(caught.value)
    assert caught.value.__cause__ is cause
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event["cause"], event["iteration"]) == ("stopped", "engine_died", 7)


def test_one_of_several_processes_does_not_wait_for_the_others_to_save_with_it(tmp_path):
    with pytest.raises(StoppedError, match="No checkpoint had been written"):
        stop_run(trainer(tmp_path, processes=2), "engine_died", "It broke.", save=True)
