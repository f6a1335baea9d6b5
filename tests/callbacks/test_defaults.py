import pytest
from lightning.pytorch import Trainer

from lit_qrl import default_callbacks
from lit_qrl.callbacks import AIS, RunCheckpoint
from lit_qrl.callbacks.defaults import FORCED
from lit_qrl.callbacks.run_folder import RunFolder
from lit_qrl.errors import ConfigError


def test_every_run_s_callbacks_come_once_with_their_settings_and_the_lock_is_let_go_last():
    made = default_callbacks(AIS(), checkpoint={"keep_every": 3}, guard={"ess_floor": 0.5})
    assert [type(one) for one in made] == [AIS, *FORCED.values(), RunFolder]
    assert made[-2].keep_every == 3
    assert made[4].ess_floor == 0.5
    trainer = Trainer(accelerator="cpu", callbacks=made, logger=False)
    assert [type(one) for one in trainer.callbacks][-2:] == [RunCheckpoint, RunFolder]


def test_the_table_can_be_left_out_and_nothing_else():
    assert "RLProgress" not in [type(one).__name__ for one in default_callbacks(progress=None)]
    with pytest.raises(ConfigError, match="Every run has 'guard'"):
        default_callbacks(guard=None)
    with pytest.raises(ConfigError, match=r"no 'publish'.*Did you mean 'publisher'"):
        default_callbacks(publish={})
    with pytest.raises(ConfigError, match="no such number format"):
        default_callbacks(publisher={"format": "fp9"})
