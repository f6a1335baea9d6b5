import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.run import folder as places


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    for name in (places.HANDED_ON, "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    places._made.clear()
    os.environ.pop(places.HANDED_ON, None)


def trained(folder):
    folder = Path(folder)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    return folder


@pytest.mark.parametrize(
    ("taken", "expected"), [([], "1"), (["1", "2"], "3"), (["2", "10", "9"], "11"), (["1", "notes", "3.old", "²"], "2")]
)
def test_runs_are_numbered(tmp_path, taken, expected):
    for name in taken:
        (tmp_path / name).mkdir()
    assert places.next_free(tmp_path) == tmp_path / expected
    assert places.new_folder(tmp_path) == tmp_path / expected


def test_the_newest_is_the_highest_number_and_not_the_last_word(tmp_path):
    folders = [tmp_path / name for name in ("10", "9", "b", "a")]
    assert [path.name for path in places.oldest_first(folders)] == ["a", "b", "9", "10"]


def test_what_a_folder_is(tmp_path):
    assert not places.is_run(tmp_path)
    (tmp_path / "config.yaml").touch()
    assert places.is_run(tmp_path)
    assert not places.has_trained(tmp_path)
    (tmp_path / "events.jsonl").touch()
    assert places.has_trained(tmp_path)
    assert places.last_checkpoint(tmp_path) is None
    assert places.has_trained(trained(tmp_path / "other"))


def test_folders_without_a_checkpoint_do_not_hide_the_run_that_is_resumed():
    assert places.newest_with_checkpoint(Path("runs/a")) is None
    for number in ("2", "9", "10"):
        trained(f"runs/a/{number}")
    Path("runs/a/17").mkdir()
    trained("runs/a/validate")
    assert places.newest_with_checkpoint(Path("runs/a")) == Path("runs/a/10")
    assert places.place("fit", None, "a", resume=True) == (Path("runs/a/10"), Path("runs/a/10"))
    assert places.place("fit", None, "a", resume=False)[0] == Path("runs/a/18")


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_what_does_not_train_takes_no_number_of_a_run(command):
    assert places.place(command, None, "a", resume=False)[0] == Path("runs/a") / command / "1"
    trained("runs/a/3")
    assert places.place(command, None, "a", resume=True) == (Path("runs/a/3") / command / "1", Path("runs/a/3"))
    assert places.place(command, "runs/a/3", "a", resume=True)[0] == Path("runs/a/3") / command / "2"
    assert places.place(command, "elsewhere", "a", resume=False)[0] == Path("elsewhere")
    assert places.place("fit", None, "a", resume=False)[0] == Path("runs/a/4")
    assert places.place("fit", "runs/a/3", "a", resume=False)[0] == Path("runs/a/3")


def test_runs_that_start_together_do_not_collide(tmp_path):
    base = tmp_path / "runs" / "a"
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: places.new_folder(base), range(32)))
    assert sorted(int(folder.name) for folder in folders) == list(range(1, 33))


def test_a_folder_that_another_run_makes_meanwhile_is_no_fault(tmp_path, monkeypatch):
    (base := tmp_path / "runs" / "a").mkdir(parents=True)
    truly = places.tempfile.TemporaryFile

    def made_by_another(dir):
        with suppress(FileExistsError):
            (base / "1").mkdir()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return truly(dir=dir)

    monkeypatch.setattr(places.tempfile, "TemporaryFile", made_by_another)
    assert places.new_folder(base) == base / "2"


def test_the_ranks_of_a_run_share_its_folder(tmp_path, monkeypatch):
    mine = places.new_folder(tmp_path)
    code = f"import pathlib, lit_qrl.run.folder as f; print(f.new_folder(pathlib.Path({str(tmp_path)!r}))); f.let_go()"
    environment = {**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(mine)
    assert mine.is_dir()


def test_ranks_that_a_launcher_started_make_no_folder_before_all_have_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert [places.new_folder(tmp_path / "a") for _ in range(2)] == [tmp_path / "a" / "1"] * 2
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("written", [[], ["config.yaml"], ["config.yaml", "checkpoints/"]])
def test_a_folder_in_which_nothing_happened_goes(written):
    folder = places.new_folder(Path("runs/a"))
    for name in written:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()
    places.let_go()
    assert not Path("runs").exists()
    assert places.HANDED_ON not in os.environ


@pytest.mark.parametrize("written", ["events.jsonl", "metrics.csv", "predictions.jsonl", "checkpoints/last.ckpt"])
def test_a_folder_in_which_something_happened_stays(written):
    folder = places.new_folder(Path("runs/a"))
    (folder / "checkpoints").mkdir()
    (folder / "config.yaml").touch()
    (folder / written).touch()
    places.let_go()
    assert (folder / written).is_file()
    assert places.new_folder(Path("runs/a")) == Path("runs/a/2")


def test_what_others_made_is_not_removed(tmp_path):
    (tmp_path / "runs" / "a" / "1").mkdir(parents=True)
    places.new_folder(Path("runs/a"))
    places.let_go()
    places.let_go()
    assert Path("runs/a/1").is_dir()


def test_processes_that_look_at_one_place_at_the_same_moment_do_not_disturb_each_other(tmp_path):
    place = tmp_path / "a" / "b" / "c"
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(places.check_place, [place] * 400)) == [None] * 400


def test_a_place_is_tried_and_left_as_it_was(tmp_path):
    places.check_place(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "run"
    kept.mkdir()
    (kept / "metrics.csv").write_text("epoch")
    places.check_place(kept)
    assert [path.name for path in kept.iterdir()] == ["metrics.csv"]


def test_a_place_under_a_file_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    for attempt in (places.check_place, places.new_folder):
        with pytest.raises(ConfigError, match=r"cannot be written.*Not a directory.*trainer\.default_root_dir"):
            attempt(tmp_path / "file" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def runs():
    for name in [*(f"runs/quickstart/{i}" for i in range(1, 12)), "runs/quickstart/validate/1", "runs/mine/2"]:
        Path(name).mkdir(parents=True)
        Path(name, "config.yaml").touch()
    Path("configs/task").mkdir(parents=True)


@pytest.mark.parametrize("given", ["runs/quickstart", "runs/quickstart/42", "runs/quikstart", "runs", "configs/task"])
@pytest.mark.usefixtures("runs")
def test_the_newest_runs_near_a_folder_are_named(given):
    newest = ", ".join(f"runs/quickstart/{i}" for i in range(11, 6, -1))
    assert places.meant(Path(given)) == f"Choose one of {newest} and 7 more."
    assert places.meant(Path("runs/mine/3")) == "Did you mean runs/mine/2?"


@pytest.mark.usefixtures("runs")
def test_without_any_run_the_way_to_one_is_named(tmp_path):
    assert places.meant(tmp_path / "configs", runs=tmp_path / "nothing") == "lit-qrl fit makes one, under runs/."


def test_a_new_training_does_not_overwrite_another_s_checkpoint(tmp_path):
    places.keep_last(tmp_path / "new", None)
    trained(tmp_path / "run")
    last = places.last_checkpoint(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"would overwrite.*--ckpt_path last"):
        places.keep_last(tmp_path / "run", None)
    places.keep_last(tmp_path / "run", last)
    assert last.is_file()
    content = last.read_bytes()
    places.keep_last(tmp_path / "run", tmp_path / "run" / "checkpoints" / "iteration-3.ckpt")
    assert not last.exists()
    assert last.with_name("last.1.ckpt").read_bytes() == content
