"""Learners in parts are refused before anything is loaded, from Python as from the command line."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lit_qrl.errors import ConfigError
from lit_qrl.formats import Int4Group
from lit_qrl.objective import GRPO
from lit_qrl.optim import MuonAdamW
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import QATAligned
from lit_qrl.precision.deferred import weights_are_deferred
from lit_qrl.strategies import sharded
from lit_qrl.strategies.sharded import ShardedStrategy, check_strategy
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


def refused(tmp_path, match, strategy=None, **options):
    trainer, module, _ = build(tmp_path, **options)
    strategy = strategy or ShardedStrategy("fp32")
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0)
    strategy.precision_plugin = trainer.precision_plugin
    with pytest.raises(ConfigError, match=match):
        strategy.check(module)


def test_what_cannot_be_divided_is_refused_with_what_to_do(tmp_path):
    refused(tmp_path, "keeps the learner in fp32.*Given: bf16.*compute_dtype to bf16", policy={"dtype": "bf16"})
    refused(tmp_path, "MuonAdamW may need whole matrices.*AdamW", optimizer=lambda named: MuonAdamW(named))
    plugin = {"plugins": [QATAligned(Int4Group(32))]}
    refused(tmp_path, "QATAligned computes on whole weights.*Remove the plugin", trainer=plugin, format="auto")
    refused(tmp_path, "offload moves the learner to the host.*Given: cpu", ShardedStrategy("fp32", offload=True))
    with pytest.raises(ConfigError, match=r"compute_dtype is unknown.*Given: fp8"):
        ShardedStrategy("fp8")


def test_a_strategy_of_ours_passes_and_plain_optimizers_do(tmp_path):
    trainer, module, _ = build(tmp_path)
    strategy = ShardedStrategy()
    check_strategy(strategy)
    strategy.precision_plugin = trainer.precision_plugin
    strategy.check(module)


def test_only_a_policy_without_a_copied_reference_waits_for_its_weights(tmp_path):
    waits = {}
    for kl in (0.0, 0.1):
        _, module, _ = build(tmp_path, objective=GRPO(kl_coefficient=kl))
        strategy = ShardedStrategy()
        strategy._lightning_module = module
        with strategy.model_sharded_context():
            waits[kl] = weights_are_deferred(adapted=False)
    assert waits == {0.0: True, 0.1: False}
    assert not weights_are_deferred(adapted=False)
