"""Checkpoints in parts: what a process group wrote is read without one, and nothing unused stays."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lit_qrl.errors import ConfigError
from lit_qrl.run.checkpoint_files import (
    new_folder,
    parts_of,
    put_together,
    read_parts,
    remove_unused,
    shapes_of,
    take_parts,
    write_parts,
)


@pytest.fixture
def mesh(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def divided(mesh, value):
    return distribute_tensor(value, mesh, [Shard(0)])


def test_parts_are_put_together_without_a_process_group(mesh, tmp_path):
    weight, moment = torch.randn(6, 4), torch.rand(6, 4)
    checkpoint = {
        "state_dict": {"policy.w": divided(mesh, weight), "policy.count": torch.tensor(3)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0), "exp_avg": divided(mesh, moment)}}}],
    }
    taken = take_parts(checkpoint)
    assert sorted(taken) == ["optimizers.0.0.exp_avg", "weights.policy.w"]
    assert checkpoint["state_dict"] == {"policy.count": torch.tensor(3)}
    folder = new_folder(tmp_path / "last.ckpt", 7)
    write_parts(taken, folder)
    assert new_folder(tmp_path / "last.ckpt", 7) != folder
    checkpoint["parts"] = folder.name
    torch.save(checkpoint, tmp_path / "last.ckpt")
    into = divided(mesh, torch.zeros(6, 4))
    read_parts({"weights.policy.w": into}, folder)
    assert torch.equal(into.full_tensor(), weight)
    torch.distributed.destroy_process_group()

    assert shapes_of(folder)["weights.policy.w"] == ((6, 4), torch.float32)
    read = torch.load(tmp_path / "last.ckpt", weights_only=True)
    put_together(read, tmp_path / "last.ckpt")
    assert torch.equal(read["state_dict"]["policy.w"], weight)
    assert torch.equal(read["optimizer_states"][0]["state"][0]["exp_avg"], moment)
    assert read["optimizer_states"][0]["state"][0]["step"] == 2.0
    assert "parts" not in read
    weights_alone = torch.load(tmp_path / "last.ckpt", weights_only=True)
    put_together(weights_alone, tmp_path / "last.ckpt", optimizers=False)
    assert torch.equal(weights_alone["state_dict"]["policy.w"], weight)
    assert weights_alone["optimizer_states"][0]["state"][0].keys() == {"step"}


def test_a_checkpoint_in_one_file_stays_as_it_is(tmp_path):
    checkpoint = {"state_dict": {"w": nn.Parameter(torch.ones(1))}}
    put_together(checkpoint, tmp_path / "last.ckpt")
    assert checkpoint["state_dict"]["w"] == 1


def test_parts_that_were_left_behind_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"they are not beside it.*parts-3.*together with its folder"):
        parts_of({"parts": "parts-3"}, tmp_path / "last.ckpt")


def test_what_no_checkpoint_names_is_removed(tmp_path):
    for name in ("parts-1", "parts-2", "parts-3", "parts-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
    torch.save({"parts": "parts-2"}, tmp_path / "iteration-1.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    (tmp_path / "damaged.ckpt").write_bytes(b"?")
    remove_unused(tmp_path, tmp_path / "parts-4")
    assert len(list(tmp_path.glob("parts-*"))) == 4
    (tmp_path / "damaged.ckpt").unlink()
    remove_unused(tmp_path, tmp_path / "parts-4")
    assert sorted(one.name for one in tmp_path.glob("parts-*")) == ["parts-2", "parts-4"]
