from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lit_qrl.network import shards
from lit_qrl.network.adapters import merged_weights
from lit_qrl.network.shards import divided as cut
from lit_qrl.network.shards import gathered, is_sharded, own, own_part, whole
from tests.two_processes import one_process


@pytest.fixture
def mesh(tmp_path):
    with one_process(tmp_path) as made:
        yield made


def divided(mesh, *shape):
    return nn.Parameter(distribute_tensor(torch.randn(*shape), mesh, [Shard(0)]))


def test_a_divided_parameter_is_whole_inside_and_itself_after(mesh):
    layer = nn.Linear(3, 2)
    plain = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    for name, value in plain.items():
        setattr(layer, name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])))
    kept = layer.weight
    assert is_sharded(layer)
    with gathered(layer):
        assert not is_sharded(layer)
        assert torch.equal(layer.weight, plain["weight"])
        layer.weight.data.zero_()
    assert layer.weight is kept
    assert torch.equal(whole(layer.weight), plain["weight"])
    found = dict(merged_weights(layer))
    assert all(torch.equal(found[name], value) and type(found[name]) is torch.Tensor for name, value in plain.items())


def test_the_own_part_of_a_single_process_is_all_in_the_same_memory_and_another_is_cut_alike(mesh):
    parameter, value = divided(mesh, 4, 2), torch.randn(4, 2)
    assert type(own(parameter)) is torch.Tensor
    assert torch.equal(own(parameter), whole(parameter))
    assert own(parameter).data_ptr() == parameter._local_tensor.data_ptr()
    part = own_part(value, parameter)
    assert part.placements == parameter.placements
    assert torch.equal(whole(part), value)
    assert own_part(value, torch.empty(4, 2)) is value
    assert whole(value) is value


@pytest.mark.parametrize(("rows", "size"), [(6, 2), (5, 2), (5, 4), (1, 3)])
def test_parts_of_rows_are_gathered_by_one_collective_also_where_some_have_fewer(rows, size, monkeypatch):
    """Processes are played: what each would send is put where it belongs."""
    value = torch.randn(rows, 3)
    most = -(-rows // size)
    parts = [value[rank * most : (rank + 1) * most] for rank in range(size)]
    sent = []

    def gather(found, part, group):
        sent.append(part)
        padded = [torch.cat([one, one.new_full((most - len(one), 3), torch.nan)]) for one in parts]
        found.copy_(torch.cat(padded))

    monkeypatch.setattr(shards, "gather_into", gather)
    torch.distributed.init_process_group("fake", rank=size - 1, world_size=size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (size,))
        held = DTensor.from_local(parts[-1], mesh, [Shard(0)], shape=value.shape, stride=value.stride())
        assert torch.equal(whole(held), value)
    finally:
        torch.distributed.destroy_process_group()
    assert [len(one) for one in sent] == [most]
    assert torch.equal(sent[0][: len(parts[-1])], parts[-1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32])
def test_bytes_are_cut_into_equal_parts_for_any_number_of_processes(dtype):
    value = torch.arange(7 * 3).view(7, 3).to(dtype)
    for size in (1, 2, 3, 50):
        made = [cut(value, SimpleNamespace(size=lambda n=size: n, rank=lambda r=rank: r)) for rank in range(size)]
        parts = [part for part, _ in made]
        assert len({part.numel() for part in parts}) == 1
        joined = torch.cat(parts)[: value.numel() * dtype.itemsize].view(dtype).view(7, 3)
        assert torch.equal(joined.view(torch.uint8), value.view(torch.uint8))
        assert {(whole.shape, whole.dtype) for _, whole in made} == {(value.shape, dtype)}


def test_a_tensor_whose_bytes_were_cut_is_had_again(mesh):
    value = torch.randn(5, 3).to(torch.float8_e4m3fn)
    part, whole_again = cut(value, mesh.get_group())
    found = whole_again.whole(part)
    assert found.dtype == value.dtype
    assert torch.equal(found.float(), value.float())
