"""Learners in parts are refused before anything is loaded, from Python as from the command line."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats import Int4Group
from lit_qrl.loop.batching import assemble
from lit_qrl.network.experts import ExpertList
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.shards import own, whole
from lit_qrl.objective import GRPO
from lit_qrl.optim import MuonAdamW
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.precision.deferred import weights_are_deferred
from lit_qrl.precision.layers.packed_linear import PackedLinear
from lit_qrl.precision.source import WeightSource, unchanged
from lit_qrl.strategies import sharded
from lit_qrl.strategies.sharded import ShardedStrategy, check_strategy, divide_packed
from lit_qrl.types import Completion
from tests.tiny_run import build, model_folder


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy])
def test_a_sharded_learner_is_refused_with_what_to_do_instead(strategy):
    made = strategy.__new__(strategy)  # that of DeepSpeed looks for its package
    with pytest.raises(ConfigError, match=rf"^{strategy.__name__} shards the learner.*ColocatedStrategy.*lora"):
        check_strategy(made)


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
    refused(
        tmp_path, "LBFGS may need whole matrices.*MuonAdamW", optimizer=lambda n: torch.optim.LBFGS(dict(n).values())
    )
    eight_bit = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    refused(tmp_path, "AdamW8bit may need whole matrices.*MuonAdamW", optimizer=lambda n: eight_bit(dict(n).values()))
    half = {"precision": "bf16-true"}
    refused(tmp_path, "would make all of it 16-bit.*Given: bf16-true.*--trainer.precision null", trainer=half)
    plugin = {"plugins": [NVFP4LoRA(share_weights=True)]}
    refused(tmp_path, "NVFP4LoRA cannot share its base.*share_weights: false", trainer=plugin, format="auto")
    refused(tmp_path, "offload moves the learner to the host.*Given: cpu", ShardedStrategy("fp32", offload=True))


def test_a_learner_in_parts_is_not_batch_invariant(tmp_path):
    trainer, module, _ = build(tmp_path)
    strategy = ShardedStrategy()
    strategy.precision_plugin, module.policy.batch_invariant = trainer.precision_plugin, True
    with pytest.raises(ConfigError, match=r"same bits for any batch.*batch_invariant: false.*strategy to ddp"):
        strategy.check(module)


def test_only_a_packed_base_of_linear_layers_is_divided():
    with pytest.raises(ConfigError, match=r"the policy has none.*NVFP4LoRA"):
        divide_packed(torch.nn.Linear(2, 2), None)
    layer = PackedLinear(Int4Group(32), (2, 32), None)
    experts = ExpertList.__new__(ExpertList)
    torch.nn.Module.__init__(experts)
    experts.layer = layer
    with pytest.raises(ConfigError, match=r"processes choose different ones.*replicated"):
        divide_packed(torch.nn.Sequential(experts), None)


def test_a_strategy_of_ours_passes_and_plain_optimizers_do(tmp_path):
    trainer, module, _ = build(tmp_path)
    strategy = ShardedStrategy()
    check_strategy(strategy)
    for plugin in (trainer.precision_plugin, QATAligned(Int4Group(32)), NVFP4LoRA()):
        strategy.precision_plugin = plugin
        strategy.check(module)
    module.optimizer = lambda named: MuonAdamW(named)
    strategy.check(module)


def test_a_policy_and_its_reference_are_read_and_divided_layer_by_layer(tmp_path, monkeypatch):
    """A process holds one layer that is not divided; the reference has the learner's numbers, without gradients."""
    _, module, _ = build(tmp_path, objective=GRPO(kl_coefficient=0.1))
    expected = CausalPolicy(str(tmp_path / "model"))
    expected.configure()
    strategy, policy = ShardedStrategy("fp32"), module.policy
    strategy._lightning_module, strategy._device_mesh = module, {"data_parallel": None}
    strategy.parallel_devices = [torch.device("cpu")]
    with strategy.model_sharded_context():
        assert weights_are_deferred(adapted=False)
        policy.configure()
        policy.keep_reference()
    assert not weights_are_deferred(adapted=False)
    most, parts = [], {}

    def divide(part, **options):
        whole = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in every(policy)}
        most.append(sum(size for size in whole.values() if size > 4))
        for child in part.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    parts.setdefault((child, name), parameter)
                    child._parameters[name] = torch.nn.Parameter(torch.zeros(()), parameter.requires_grad)

    monkeypatch.setattr(sharded, "fully_shard", divide)
    strategy.shard(policy)
    layer = sum(p.nbytes for p in expected.network.model.layers[0].parameters())
    rest = sum(p.nbytes for p in expected.network.parameters()) - 2 * layer
    assert max(most) == max(layer, rest)
    for root, trained in ((policy.network, True), (policy.frozen_copies[0].network, False)):
        for name, wanted in expected.network.named_parameters():
            owner, _, leaf = name.rpartition(".")
            found = parts[root.get_submodule(owner), leaf]
            assert torch.equal(found, wanted)
            assert found.requires_grad == trained


@pytest.fixture
def parts(tmp_path):
    """A policy of two layers in the parts of two processes, of which the other is not there: nothing waits for it."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    strategy = ShardedStrategy()
    strategy._device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0)
    policy = CausalPolicy(model_folder(tmp_path), gradient_checkpointing=True)
    with strategy.model_sharded_context():
        policy.configure()
    strategy.shard(policy)
    yield policy
    torch.distributed.destroy_process_group()


def collectives(mode):
    return {str(name).rpartition(".")[2]: count for name, count in mode.get_comm_counts().items()}


def test_a_micro_batch_gathers_a_layer_twice_and_sums_its_gradients_once(parts):
    """Also where the layer is computed again; a step and its clipping move no weights."""
    groups = 2 + 1  # layers, and what is in none
    drawn = [Completion(token_ids=[3, 4, 5], logprobs=[-1.0] * 3, finish_reason="length", version=0)] * 4
    batch = assemble([[3, 4], [5, 6]], drawn, 2, 0)
    moved = []
    for _ in range(2):
        with CommDebugMode() as mode:
            parts(batch, 1.0).logprobs.sum().backward()
        moved.append(collectives(mode))
    assert moved == [{"_allgather_base_": 2 * groups, "_reduce_scatter_base_": groups}] * 2
    optimizer = torch.optim.AdamW(parts.parameters())
    with CommDebugMode() as mode:
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
    assert collectives(mode) == {"all_reduce": 1}


def test_a_publish_gathers_each_tensor_once(parts):
    with CommDebugMode() as mode:
        sent = dict(WeightSource(parts, formats.get("fp8_row")).whole(unchanged, torch.bfloat16))
    assert {f"{name}.weight_scale" for name in quantizable_linears(parts.network)} < sent.keys()
    assert collectives(mode) == {"_allgather_base_": len(list(parts.network.parameters()))}


@pytest.mark.gpu
def test_parts_that_wait_on_the_host_learn_what_those_on_the_gpu_do(tmp_path):
    """One process: what travels between host and GPU is what is looked at."""
    found, moved = [], []
    for offload in (False, True):
        strategy = ShardedStrategy("fp32", offload=offload)
        options = {"accelerator": "cuda", "devices": 1, "strategy": strategy, "max_epochs": 2}
        trainer, module, data = build(tmp_path / str(offload), trainer=options, format="fp32")
        trainer.fit(module, datamodule=data)
        found.append({name: whole(p.detach()).cpu() for name, p in module.named_parameters()})
        moved.append({own(p).device.type for p in module.parameters()})
        states = trainer.optimizers[0].state.values()
        moved[-1] |= {own(value).device.type for state in states for value in state.values() if value.ndim}
        torch.distributed.destroy_process_group()
    assert moved == [{"cuda"}, {"cpu"}]
    for name, value in found[0].items():  # AdamW makes a larger step of a small gradient's rounding
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-5, msg=name)


def every(policy):
    """Every parameter of a policy and of its reference."""
    return [p for one in (policy, *policy.frozen_copies) for p in one.parameters()]
