"""What a loader of experts would write is counted without running it, where it is known."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.vllm.patches.expert_counts import PATCH, _known


class RoutedExperts:
    """Has what vLLM's module of experts says of itself, and its loader."""

    def __init__(self, here=4, tp_size=1):
        self.local_num_experts, self.global_num_experts = here, 4
        self.moe_config = SimpleNamespace(tp_size=tp_size)
        self.ran = 0

    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
        self.ran += 1
        param[expert_id] = loaded_weight
        return True if return_success else None


def dry_run(weight_loader, args):
    return args.arguments["param"][0].numel(), weight_loader(*args.args, **args.kwargs)


def counted(experts, tensor, shard="w1", **options):
    loader = experts.weight_loader
    param = torch.zeros(4, *tensor.shape)
    args = inspect.signature(loader).bind(param, tensor, "experts.1.gate_proj.weight", shard, 1, **options)
    args.apply_defaults()
    return _known(dry_run)(loader, args)


@pytest.mark.parametrize("shape", [(6, 8), (6,), ()])
def test_a_tensor_of_one_expert_counts_whole(shape):
    experts = RoutedExperts()
    assert counted(experts, torch.ones(shape), return_success=True) == (torch.ones(shape).numel(), True)
    assert counted(experts, torch.ones(shape)) == (torch.ones(shape).numel(), None)
    assert experts.ran == 0


@pytest.mark.parametrize("experts", [RoutedExperts(here=2), RoutedExperts(tp_size=2)], ids=["some", "parts"])
def test_where_a_process_holds_a_part_the_loader_says_it(experts):
    assert counted(experts, torch.ones(6, 8), return_success=True) == (48, True)
    assert experts.ran == 1


def test_other_loaders_and_stacks_of_experts_are_run():
    experts = RoutedExperts()
    counted(experts, torch.ones(2, 6, 8))
    counted(experts, torch.ones(6, 8), shard="q")
    assert experts.ran == 2
    linear = type("Linear", (RoutedExperts,), {})()
    counted(linear, torch.ones(6, 8))
    assert linear.ran == 1


@pytest.mark.vllm
def test_the_loader_and_the_dry_run_are_called_as_here():
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as Theirs
    from vllm.model_executor.model_loader.reload import layerwise

    original = getattr(layerwise.get_numel_loaded, "lit_qrl_original", layerwise.get_numel_loaded)
    names = inspect.signature(Theirs.weight_loader).parameters
    assert {"loaded_weight", "shard_id", "return_success"} <= names.keys()
    assert list(inspect.signature(original).parameters) == ["weight_loader", "args"]


def test_it_is_for_every_version_that_was_run():
    assert PATCH.concerns((0, 26, 0), "cuda")
    assert PATCH.concerns((0, 32, 0), "cpu")
