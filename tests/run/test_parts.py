"""Checkpoints in parts, and whatever else lies where one is read: whole, damaged, or made to run code."""

import ast
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import lit_qrl
from lit_qrl.callbacks.checkpoint import resolve_checkpoint
from lit_qrl.errors import ConfigError
from lit_qrl.run import checkpoint_files as files
from lit_qrl.strategies import ShardedStrategy
from tests.two_processes import one_process


@pytest.fixture
def mesh(tmp_path):
    with one_process(tmp_path) as made:
        yield made


def divided(mesh, value):
    return distribute_tensor(value, mesh, [Shard(0)])


def test_parts_are_put_together_without_a_process_group(mesh, tmp_path):
    weight, moment = torch.randn(6, 4), torch.rand(6, 4)
    checkpoint = {
        "state_dict": {"policy.w": divided(mesh, weight), "policy.count": torch.tensor(3)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0), "exp_avg": divided(mesh, moment)}}}],
    }
    taken = files.take_parts(checkpoint)
    assert sorted(taken) == ["optimizers.0.0.exp_avg", "weights.policy.w"]
    assert checkpoint["state_dict"] == {"policy.count": torch.tensor(3)}
    folder = tmp_path / "parts-7-0"
    files.write_parts(taken, folder)
    checkpoint["parts"] = folder.name
    torch.save(checkpoint, tmp_path / "last.ckpt")
    into = divided(mesh, torch.zeros(6, 4))
    files.read_parts({"weights.policy.w": into}, folder)
    assert torch.equal(into.full_tensor(), weight)
    torch.distributed.destroy_process_group()

    assert files.shapes_of(folder)["weights.policy.w"] == ((6, 4), torch.float32)
    read = torch.load(tmp_path / "last.ckpt", weights_only=True)
    files.put_together(read, tmp_path / "last.ckpt")
    assert torch.equal(read["state_dict"]["policy.w"], weight)
    assert torch.equal(read["optimizer_states"][0]["state"][0]["exp_avg"], moment)
    assert read["optimizer_states"][0]["state"][0]["step"] == 2.0
    assert "parts" not in read
    weights_alone = torch.load(tmp_path / "last.ckpt", weights_only=True)
    files.put_together(weights_alone, tmp_path / "last.ckpt", optimizers=False)
    assert torch.equal(weights_alone["state_dict"]["policy.w"], weight)
    assert weights_alone["optimizer_states"][0]["state"][0].keys() == {"step"}


def test_a_checkpoint_in_one_file_stays_as_it_is(tmp_path):
    checkpoint = {"state_dict": {"w": nn.Parameter(torch.ones(1))}}
    files.put_together(checkpoint, tmp_path / "last.ckpt")
    assert checkpoint["state_dict"]["w"] == 1


def test_parts_that_were_left_behind_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"its parts are not beside it.*parts-3.*together with its folder"):
        files.parts_of({"parts": "parts-3"}, tmp_path / "last.ckpt")


def test_what_no_checkpoint_names_is_removed(tmp_path):
    for name in ("parts-1", "parts-2", "parts-3", "parts-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
    torch.save({"parts": "parts-2"}, tmp_path / "iteration-1.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    (tmp_path / "damaged.ckpt").write_bytes(b"?")
    files.remove_unused(tmp_path, tmp_path / "parts-4")
    assert len(list(tmp_path.glob("parts-*"))) == 4
    (tmp_path / "damaged.ckpt").unlink()
    files.remove_unused(tmp_path, tmp_path / "parts-4")
    assert sorted(one.name for one in tmp_path.glob("parts-*")) == ["parts-2", "parts-4"]


class Runs:
    """What leaves a file behind when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Return the checkpoint of one process in a folder that is also the working directory, `parts-1` beside it."""
    monkeypatch.chdir(tmp_path)
    files.write_parts({"weights.policy.w": torch.ones(6, 4)}, tmp_path / "kept" / "parts-1")
    path = tmp_path / "kept" / "last.ckpt"
    torch.save({"state_dict": {}, "global_step": 1, "parts": "parts-1"}, path)
    return path


def name_parts(path, name):
    torch.save({**torch.load(path, weights_only=True), "parts": name}, path)


def elsewhere(path):
    """Return a folder with code where the description of parts should be."""
    folder = path.parent.parent / "elsewhere"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))
    return folder


ATTACKS = {
    "absolute": lambda path: name_parts(path, str(elsewhere(path))),
    "upwards": lambda path: name_parts(path, f"../{elsewhere(path).name}"),
    "parent": lambda path: name_parts(path, ".."),
    "link": lambda path: ((path.parent / "parts-2").symlink_to(elsewhere(path)), name_parts(path, "parts-2")),
    "metadata": lambda path: (path.parent / "parts-1" / ".metadata").write_bytes(pickle.dumps(Runs())),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Runs())),
    "object": lambda path: torch.save({"state_dict": {}, "global_step": 1, "callbacks": Runs()}, path),
}


def by_a_trainer(path):
    """Read as a Trainer does that is told to read everything."""
    strategy = SingleDeviceStrategy("cpu")
    files.read_data_alone(strategy)
    files.put_together(strategy.load_checkpoint(path, weights_only=False), path)


@pytest.mark.parametrize(
    "read", [files.read_checkpoint, lambda path: ShardedStrategy().load_checkpoint(path), by_a_trainer]
)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_checkpoint_runs_no_code(parts, attack, read):
    ATTACKS[attack](parts)
    why = r"cannot be read: (it names|it holds \w+\.mkdir, which is code|.* was never a checkpoint)"
    with pytest.raises(ConfigError, match=why) as refused:
        read(parts)
    assert not Path("ran").exists()
    assert "weights_only" not in str(refused.value)


UNPICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def reads_of(tree):
    """Yield where a module calls `torch.load` without `weights_only=True`, or imports what unpickles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            if not any(one.arg == "weights_only" and ast.unparse(one.value) == "True" for one in node.keywords):
                yield node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named = {alias.name for alias in node.names}
            if {getattr(node, "module", None), *named} & UNPICKLING and named != {"UnpicklingError"}:
                yield node.lineno


ALLOWED = {
    "run/checkpoint_files.py": "`_MetadataUnpickler`",
    "rewards/workers.py": "a process of this one's reads what it was sent by it",
    "data/environment.py": "such a process reads a state that it has written",
}


def test_nothing_else_in_the_library_unpickles():
    root = Path(lit_qrl.__path__[0])
    files = {file.relative_to(root).as_posix(): ast.parse(file.read_text()) for file in root.rglob("*.py")}
    found = {name: len(list(reads_of(tree))) for name, tree in files.items()}
    assert {name: count for name, count in found.items() if count} == dict.fromkeys(ALLOWED, 1)


def damage(path, how):
    whole = path.read_bytes()
    parts = path.parent / "parts-1"
    if how == "missing part":
        next(parts.glob("*.distcp")).unlink()
    elif how == "cut part":
        next(parts.glob("*.distcp")).write_bytes(b"")
    elif how == "no parts":
        shutil.rmtree(parts)
    else:
        zeros = bytes(len(whole) // 2)
        written = {"empty": b"", "zeros": whole[: len(zeros)] + zeros, "cut": whole[:-300], "text": b"no checkpoint"}
        path.write_bytes(written[how])


DAMAGES = {
    "empty": "it is empty",
    "cut": "it is cut short",
    "zeros": "it is cut short",
    "text": "it is cut short, or was never a checkpoint",
    "missing part": r"of its parts .*distcp is missing",
    "cut part": r"of its parts .*distcp is cut short",
    "no parts": "its parts are not beside it",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_names_those_that_are_whole(parts, how):
    run, folder = parts.parent.parent, parts.parent.rename(parts.parent.parent / "checkpoints")
    for step in (2, 4):
        torch.save({"state_dict": {}, "global_step": step}, folder / f"iteration-{step}.ckpt")
    (folder / "iteration-6.ckpt").write_bytes(b"")
    assert resolve_checkpoint("last", run, False) == str(folder / "last.ckpt")
    damage(folder / "last.ckpt", how)
    newest = folder / "iteration-4.ckpt"
    with pytest.raises(ConfigError, match=rf"last\.ckpt cannot be read: {DAMAGES[how]}") as refused:
        resolve_checkpoint("last", run, False)
    assert f"{newest}, {folder / 'iteration-2.ckpt'}." in refused.value.remedy
    assert f"--ckpt_path {newest}" in refused.value.remedy
    assert "weights_only" not in str(refused.value)
    assert resolve_checkpoint(None, run, True) == resolve_checkpoint("last", run, True) == str(newest)
    with pytest.raises(ConfigError, match="cannot be read"):  # who names a file gets that file
        resolve_checkpoint(str(folder / "last.ckpt"), run, True)
    for whole in (2, 4):
        (folder / f"iteration-{whole}.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"No other checkpoint beside it is whole\."):
        resolve_checkpoint("last", run, True)
