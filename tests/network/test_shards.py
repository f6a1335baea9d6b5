from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lit_qrl.network.adapters import merged_weights
from lit_qrl.network.shards import divided as cut
from lit_qrl.network.shards import gathered, is_sharded, own, own_part, whole


@pytest.fixture
def mesh(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


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


def test_the_own_part_of_a_single_process_is_all_in_the_same_memory(mesh):
    parameter = divided(mesh, 4, 2)
    assert type(own(parameter)) is torch.Tensor
    assert torch.equal(own(parameter), whole(parameter))
    assert own(parameter).data_ptr() == parameter._local_tensor.data_ptr()


def test_a_part_is_cut_as_another_is(mesh):
    parameter, value = divided(mesh, 4, 2), torch.randn(4, 2)
    part = own_part(value, parameter)
    assert part.placements == parameter.placements
    assert torch.equal(whole(part), value)
    assert own_part(value, torch.empty(4, 2)) is value
    assert whole(value) is value


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
