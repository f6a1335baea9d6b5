"""An engine of several processes: what it can be, the part that each holds, and requests that all make alike."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import Learners, SamplerSpec
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.rollout.vllm.locations import Place
from lit_qrl.rollout.vllm.parallel import check, check_model, joined, own_part
from tests.networks import build_network
from tests.routes import build_mixture


def spec(local, whole, **options):
    return SamplerSpec(learners=Learners(local=(0, local), whole=(0, whole)), **options)


def test_one_process_by_itself_needs_nothing():
    check(1, SamplerSpec(), {"batch_invariant": True})
    check(2, spec(4, 8), {"max_lora_rank": 0})
    check_model(build_network(num_attention_heads=3, num_key_value_heads=3), 1)


@pytest.mark.parametrize(
    ("size", "given", "settings", "message"),
    [
        (0, spec(2, 2), {}, "at least 1"),
        (2, spec(1, 1), {}, r"multiple of 2 processes on each host \(trainer\.devices\)\. Given: 1 of 1"),
        (4, spec(2, 4), {}, "Given: 2 of 4"),  # an engine does not span hosts
        (2, spec(2, 2, routes=True), {}, "RouterReplay"),
    ],
)
def test_what_an_engine_of_several_processes_cannot_be_is_refused(size, given, settings, message):
    with pytest.raises(ConfigError, match=message):
        check(size, given, settings)


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ({"max_lora_rank": 8}, "max_lora_rank: 8"),
        ({"sleep_level": 1}, "sleep_level: 1"),
        ({"batch_invariant": True}, "batch_invariant: True"),
        ({"same_kernels": True}, "same_kernels: True"),
    ],
)
def test_what_needs_an_engine_whole_is_refused_beside_several_processes(option, named):
    with pytest.raises(ConfigError, match=f"holds a part of each matrix.*Given: {named}"):
        VLLMEngine(tensor_parallel_size=2, **option).validate(spec(2, 2))


@pytest.mark.vllm
def test_experts_of_several_processes_are_refused():
    with pytest.raises(ConfigError, match="layers of which an engine of several processes cannot prove"):
        check_model(build_mixture(), 2)


@pytest.mark.vllm  # which knows what layers a model has
@pytest.mark.parametrize(
    ("sizes", "parts", "message"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2, "Given: 2, with 3 heads, 3 key-value heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, 3, "Given: 3, with 4 heads"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(sizes, parts, message):
    with pytest.raises(ConfigError, match=message):
        check_model(build_network(**sizes), parts)


@pytest.mark.vllm
def test_a_cut_through_groups_that_share_a_scale_is_refused():
    network = build_network(num_attention_heads=4, num_key_value_heads=2, intermediate_size=128)
    check_model(network, 2, formats.get("int4_group", group_size=64))
    with pytest.raises(ConfigError, match=r"groups of 128 weights.*Given: 128 / 2"):
        check_model(network, 2, formats.get("int4_group", group_size=128))


@pytest.mark.vllm
def test_key_value_heads_that_several_processes_hold_are_fine():
    check_model(build_network(num_attention_heads=4, num_key_value_heads=1), 4)


def layer(kind, **attributes):
    """A module of vLLM's class without its set-up, which needs vLLM's process groups."""
    from vllm.model_executor.layers import linear

    module = object.__new__(getattr(linear, kind))
    torch.nn.Module.__init__(module)
    for name, value in {"tp_size": 2, "tp_rank": 1, **attributes}.items():
        setattr(module, name, value)
    return module


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "part", "shape", "cut"),
    [
        ("ColumnParallelLinear", 0, (8, 6), lambda t: t[4:]),
        ("ColumnParallelLinear", 0, (8, 1), lambda t: t[4:]),  # a scale for each output
        ("ColumnParallelLinear", 0, (8,), lambda t: t[4:]),  # a bias
        ("ColumnParallelLinear", 0, (1,), lambda t: t),  # one scale for the layer
        ("ColumnParallelLinear", 0, (), lambda t: t),
        ("RowParallelLinear", 0, (8, 6), lambda t: t[:, 3:]),
        ("RowParallelLinear", 0, (8, 1), lambda t: t),  # a scale for each output, which every process adds to
        ("RowParallelLinear", 0, (8,), lambda t: t),
        ("ReplicatedLinear", 0, (8, 6), lambda t: t),
        ("QKVParallelLinear", 0, (8, 6), lambda t: t[4:]),
        ("QKVParallelLinear", 2, (4, 6), lambda t: t[2:]),
    ],
)
def test_each_process_holds_its_part(kind, part, shape, cut):
    parts = ("q_proj", "k_proj", "v_proj") if kind == "QKVParallelLinear" else ()
    place = Place("layer", layer(kind, num_kv_head_replicas=1), "weight", part, parts)
    tensor = torch.randn(shape)
    assert torch.equal(own_part(place, tensor), cut(tensor))


@pytest.mark.vllm
@pytest.mark.parametrize("rank", range(4))
def test_a_key_value_head_is_held_by_several(rank):
    place = Place(
        "qkv", layer("QKVParallelLinear", num_kv_head_replicas=2, tp_size=4, tp_rank=rank), "weight", 1, "qkv"
    )
    tensor = torch.randn(8, 6)  # two heads of 4
    assert torch.equal(own_part(place, tensor), tensor.view(2, 4, 6)[rank // 2])


@pytest.mark.vllm
def test_rows_of_the_vocabulary_are_those_that_the_module_counts():
    rows = SimpleNamespace(org_vocab_start_index=3, org_vocab_end_index=5)
    tensor = torch.randn(5, 2)
    assert torch.equal(own_part(Place("embed", SimpleNamespace(shard_indices=rows), "weight"), tensor), tensor[3:])


@pytest.mark.vllm
@pytest.mark.parametrize(("options", "message"), [({"shards": (0, 1)}, "fuses it"), ({}, r"2 equal parts.*\(7, 6\)")])
def test_what_cannot_be_cut_is_named(options, message):
    place = Place("layers.0.qkv", layer("ColumnParallelLinear"), "weight", **options)
    with pytest.raises(ConfigError, match=message):
        own_part(place, torch.randn(7, 6))


def test_a_process_alone_asks_for_itself():
    assert joined([[1], [2, 3]], range(2), None, None) == ([[1], [2, 3]], [0, 1], slice(0, 2))


def test_what_all_processes_ask_for_is_asked_by_each_in_one_order(tmp_path):
    torch.multiprocessing.start_processes(_joined, (tmp_path / "meeting",), nprocs=2, start_method="fork")


def _joined(rank, meeting):
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", world_size=2, rank=rank)
    everyone = distributed.group.WORLD
    prompts, numbers = ([[1], [2]], [0, 2]) if rank == 0 else ([[5, 6]], [1])
    found = joined(prompts, numbers, "alike", everyone)
    assert found == ([[1], [2], [5, 6]], [0, 2, 1], slice(0, 2) if rank == 0 else slice(2, 3))
    nothing = joined([], [], "alike", everyone) if rank else joined([[7]], [3], "alike", everyone)
    assert nothing == ([[7]], [3], slice(0, 1) if rank == 0 else slice(1, 1))
    with pytest.raises(RuntimeError, match="ask for different things"):
        joined([], [], f"of {rank}", everyone)
    distributed.destroy_process_group()
