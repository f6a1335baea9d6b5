import errno
import os
import threading

import pytest
import torch

from lit_qrl.errors import StoppedError
from lit_qrl.run import checkpoint_files as saving
from lit_qrl.run.checkpoint_files import CheckpointFiles, staging, when_written


def checkpoint(value=1.0):
    weight = torch.full((3, 2), value)
    return {"epoch": 4, "state_dict": {"a": weight, "tied": weight, "b": torch.arange(5)}, "gates": [torch.zeros(0)]}


def test_what_is_written_is_the_state_at_the_call(tmp_path, monkeypatch):
    held, save = threading.Event(), torch.save
    monkeypatch.setattr(saving.torch, "save", lambda *given: held.wait(30) and save(*given))
    files, given = CheckpointFiles(), checkpoint()
    files.save(given, [tmp_path / "last.ckpt", tmp_path / "copy.ckpt"])
    assert files.writing
    given["state_dict"]["a"].fill_(7.0)
    given["epoch"] = 5
    held.set()
    files.wait()
    assert not files.writing
    for name in ("last", "copy"):
        loaded = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert loaded["epoch"] == 4
        assert torch.equal(loaded["state_dict"]["a"], torch.ones(3, 2))
        assert loaded["state_dict"]["a"].data_ptr() == loaded["state_dict"]["tied"].data_ptr()
        assert torch.equal(loaded["state_dict"]["b"], torch.arange(5))
        assert loaded["gates"][0].shape == (0,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.ckpt", "last.ckpt"]


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_that_is_kept_is_written_once_where_the_disk_can(tmp_path, monkeypatch, links):
    saves, save = [], torch.save
    monkeypatch.setattr(saving.torch, "save", lambda *given: saves.append(1) or save(*given))
    if not links:
        monkeypatch.setattr(saving.os, "link", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOTSUP, "no links")))
    files, last, kept = CheckpointFiles(), tmp_path / "last.ckpt", tmp_path / "iteration-4.ckpt"
    (tmp_path / ".iteration-4.ckpt.partial").write_bytes(b"of a run that was killed")
    files.save(checkpoint(1.0), [last, kept])
    files.wait()
    assert len(saves) == (1 if links else 2)
    assert last.samefile(kept) == links
    files.save(checkpoint(2.0), [last])
    files.wait()
    values = [torch.load(path, weights_only=True)["state_dict"]["a"][0, 0].item() for path in (kept, last)]
    assert values == [1.0, 2.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-4.ckpt", "last.ckpt"]


def test_the_copy_on_the_host_is_used_again(tmp_path):
    files = CheckpointFiles()
    files.save(checkpoint(1.0), [tmp_path / "last.ckpt"])
    files.wait()
    memory = files._memories[False]
    first, used = [chunk.data_ptr() for chunk in memory._chunks], sum(memory._used)
    assert used == 2 * 64  # tied weights are one
    files.save({**checkpoint(2.0), "more": torch.ones(7)}, [tmp_path / "last.ckpt"])
    files.wait()
    assert [chunk.data_ptr() for chunk in memory._chunks] == first
    assert sum(memory._used) == used + 64
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["a"][0, 0] == 2.0


FULL = RuntimeError("unexpected pos 704 vs 598")  # of torch's writer, when the file is closed
FULL.__context__ = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device.*Free some space"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied.*can be written"),
        (RuntimeError("PytorchStreamWriter failed writing file data/0"), "failed writing.*Free some space"),
        (FULL, "No space left on device .*Free some space"),
    ],
)
def test_a_write_that_fails_leaves_the_file_before_it_and_is_told_at_the_next(tmp_path, monkeypatch, error, message):
    files, target = CheckpointFiles(), tmp_path / "last.ckpt"
    files.save(checkpoint(), [target])
    files.wait()
    before = target.read_bytes()

    def fails(content, file):
        file.write(b"half of it")
        raise error

    monkeypatch.setattr(saving.torch, "save", fails)
    files.save(checkpoint(2.0), [target])
    with pytest.raises(StoppedError, match=f"(?s){message}.*--ckpt_path last") as raised:
        files.save(checkpoint(3.0), [target])
    assert f"{target} could not be written" in str(raised.value)
    assert "The one before it is whole" in str(raised.value)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    files.wait()  # it is told once


def test_the_file_and_its_name_are_forced_to_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        saving.os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")) or fsync(handle)
    )
    files = CheckpointFiles()
    files.save(checkpoint(), [tmp_path / "last.ckpt"])
    files.wait()
    assert synced == [str(tmp_path / ".last.ckpt.partial"), str(tmp_path)]


def test_what_is_known_later_is_put_in_by_the_thread_that_writes(tmp_path):
    known, where = threading.Event(), []

    def made():
        known.wait(60)
        where.append(threading.current_thread().name)
        return {"drawn": torch.ones(2)}

    files, target = CheckpointFiles(), tmp_path / "last.ckpt"
    assert when_written(lambda: 3) == 3
    with staging():
        files.save({"weights": torch.zeros(1), "ahead": when_written(made)}, [target])
    assert not target.exists()
    known.set()
    files.wait()
    assert torch.load(target, weights_only=True)["ahead"]["drawn"].tolist() == [1.0, 1.0]
    assert where == ["checkpoint"]
