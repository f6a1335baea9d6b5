from types import SimpleNamespace

import pytest

from lit_qrl.errors import StoppedError
from lit_qrl.run.diary import read_jsonl
from lit_qrl.run.stop import stop_run


class Saves:
    """A checkpoint callback that only has the method."""

    def save_before_update(self, trainer):
        path = trainer.folder / "checkpoints" / "last.ckpt"
        path.parent.mkdir()
        path.touch()


def trainer(folder):
    return SimpleNamespace(
        folder=folder, default_root_dir=str(folder), callbacks=[object(), Saves()], is_global_zero=True, current_epoch=6
    )


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
