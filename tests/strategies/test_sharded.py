"""Learners in parts are refused before anything is loaded, from Python as from the command line."""

import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lit_qrl.errors import ConfigError
from lit_qrl.policy import CausalPolicy
from lit_qrl.strategies import sharded
from lit_qrl.strategies.sharded import check_strategy
from tests.tiny_run import build


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_a_sharded_learner_is_refused_with_what_to_do_instead(strategy):
    with pytest.raises(ConfigError, match=rf"^{strategy.__name__} shards the learner.*ColocatedStrategy.*lora"):
        check_strategy(strategy())


def test_strategies_with_whole_learners_pass():
    check_strategy(SingleDeviceStrategy("cpu"))
    check_strategy(DDPStrategy())


def test_a_trainer_of_ones_own_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    trainer, module, data = build(tmp_path)
    monkeypatch.setattr(CausalPolicy, "configure", lambda policy: pytest.fail("weights were loaded"))
    monkeypatch.setattr(sharded, "SHARDED", (SingleDeviceStrategy,))
    with pytest.raises(ConfigError, match=r"^SingleDeviceStrategy shards the learner"):
        trainer.fit(module, datamodule=data)
