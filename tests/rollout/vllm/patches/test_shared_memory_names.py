from types import SimpleNamespace

from torch import distributed

from lit_qrl.rollout.vllm.patches import shared_memory_names


def test_two_engines_meet_in_memory_of_their_own_and_leave_no_name_behind(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(shared_memory_names, "FOLDER", tmp_path)
    monkeypatch.setattr(
        distributed, "broadcast_object_list", lambda drawn, group, group_src: told.append((group, group_src))
    )
    names = []

    def original(shared):
        (tmp_path / f"{shared.group_name}_1").touch()
        (tmp_path / f"{shared.group_name}_0").touch()  # the other process's, which gives it back itself
        names.append(shared.group_name)
        return 7

    (change,) = shared_memory_names.PATCH.changes.values()
    for _ in range(2):
        shared = SimpleNamespace(
            group_name="-tp:0-[0-1]-cpushm", communicator=SimpleNamespace(device_group="ours", rank=1)
        )
        assert change(original)(shared) == 7
    assert told == [("ours", 0)] * 2
    assert len(set(names)) == 2
    assert all(name.startswith("-tp:0-[0-1]-cpushm-") for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}_0" for name in names)
