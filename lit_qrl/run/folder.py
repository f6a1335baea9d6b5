"""Where one run writes: `runs/<name>/<n>` for a training, and a folder of its command for what does not train."""

import errno
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lit_qrl.errors import ConfigError, listed, named
from lit_qrl.run.event_log import EVENTS_FILE, METRICS_FILE, SAMPLES_FILE

CONFIG_FILE = "config.yaml"
"""The record of what a run was started with."""
LOG_FILE = "libraries.log"
"""What the engine's libraries say."""
RUN_FILES = (METRICS_FILE, EVENTS_FILE, CONFIG_FILE, SAMPLES_FILE)
"""A folder with any of these is a run's."""
HANDED_ON = "LIT_QRL_RUN_FOLDER"
"""Environment variable by which the first process of a run tells the ranks that it starts where to write."""
_made: list[Path] = []
"""Folders that this process has made and not let go."""


def last_checkpoint(run_folder: str | Path) -> Path | None:
    """Return the run's last checkpoint, or None."""
    path = Path(run_folder) / "checkpoints" / "last.ckpt"
    return path if path.is_file() else None


def shown(path: str | Path) -> str:
    """Return a path as it is typed here: from the working directory where it lies under it.

    A run's own paths are absolute, so that code which changes the working directory moves none of its files.

    >>> shown(Path.cwd() / "runs" / "quickstart")
    'runs/quickstart'
    """
    path, here = Path(path).absolute(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def is_run(folder: Path) -> bool:
    """Return whether a folder holds the files of a run."""
    return any((folder / name).is_file() for name in RUN_FILES)


def has_trained(folder: Path) -> bool:
    """Return whether the run in a folder has begun to train."""
    return last_checkpoint(folder) is not None or (folder / EVENTS_FILE).is_file()


def oldest_first(folders: Iterable[Path]) -> list[Path]:
    """Return folders in the order of their numbers; those with another name come first.

    >>> [path.name for path in oldest_first(map(Path, ["10", "9", "notes"]))]
    ['notes', '9', '10']
    """
    return sorted(folders, key=lambda path: (number(path), str(path)))


def number(folder: Path) -> int:
    """Return the number that is a folder's name, 0 for another name."""
    return int(folder.name) if folder.name.isdecimal() else 0


def newest_with_checkpoint(base: Path) -> Path | None:
    """Return the run of the highest number under `base` that can be resumed, or None."""
    runs = [path for path in base.glob("*") if number(path) and last_checkpoint(path)]
    return oldest_first(runs)[-1] if runs else None


def resume_from(runs: str | Path) -> Path | None:
    """Return the last checkpoint of a run, or of the newest run under a folder that has one; None to start anew.

    `trainer.fit(module, data, ckpt_path=resume_from("runs/mine"))` goes on in that run's folder.

    Args:
        runs: a run folder, or the folder of its runs.

    >>> resume_from("no/such/runs") is None
    True
    """
    newest = newest_with_checkpoint(Path(runs))
    return last_checkpoint(runs) or (newest and last_checkpoint(newest))


def next_free(base: Path) -> Path:
    """Return `base/<n>` after the highest number that is taken."""
    return base / str(max(map(number, base.glob("*")), default=0) + 1)


def place(command: str, given: str | None, name: str, resume: bool) -> tuple[Path, Path]:
    """Return the folder that a command writes into, and the run whose last checkpoint it takes when it takes one.

    A training goes on in the run that it resumes. What does not train leaves the files of a training alone: it writes
    into `<command>/<n>`, in the run whose checkpoint it takes or else beside the runs.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        given: `trainer.default_root_dir`; a run that has trained already, or any other folder.
        name: of the runs under `runs/`, where no folder is given.
        resume: whether the last checkpoint is wanted.

    Raises:
        ConfigError: for a folder that cannot be made or written.
    """
    if given is not None:
        run = Path(given)
        check_place(run)
        return (run if command == "fit" or not has_trained(run) else new_folder(run / command)), run
    base = Path("runs") / name
    run = newest_with_checkpoint(base) if resume else None
    if command == "fit":
        return (run or new_folder(base)), run or base / "*"
    return new_folder((run or base) / command), run or base / "*"


def keep_last(run: Path, checkpoint: str | Path | None) -> None:
    """Keep the last checkpoint of a run from being overwritten by a training that does not go on from it.

    One that goes on from another checkpoint sets it aside as `last.1.ckpt`.

    Args:
        run: the folder that the training writes into.
        checkpoint: what it goes on from, or None.

    Raises:
        ConfigError: for a training that starts anew in a run's folder.
    """
    last = last_checkpoint(run)
    if last is None or (checkpoint is not None and Path(checkpoint).resolve() == last.resolve()):
        return
    if checkpoint is None:
        raise ConfigError(
            f"{run} holds a run with a checkpoint, which a new training there would overwrite.",
            expected="a folder of its own",
            given=f"{last} and no --ckpt_path",
            remedy="Add --ckpt_path last to go on with that run, or set trainer.default_root_dir to another folder.",
        )
    set_aside(last)


def set_aside(path: Path) -> Path:
    """Rename a file to the first free `<name>.<n><suffix>` and return that name."""
    n = 1
    while (target := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists():
        n += 1
    return path.rename(target)


def new_folder(base: Path) -> Path:
    """Return the folder under `base` that this process is to write into, made unless other processes share it.

    Two runs that start at the same moment get two folders. The ranks of one run get the same: those that this process
    starts are told by `HANDED_ON`, and those that a launcher has started make none before all of them have chosen.

    Raises:
        ConfigError: when it cannot be made or written.
    """
    handed_on = os.environ.get(HANDED_ON)
    if handed_on and "LOCAL_RANK" in os.environ:
        return Path(handed_on)
    check_place(folder := next_free(base))
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) > 1:
        return folder
    while True:
        base.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError, FileNotFoundError):  # another run took it, or took its empty parent away
            folder.mkdir()
            break
        folder = next_free(base)
    _made.append(folder)
    os.environ[HANDED_ON] = str(folder)
    return folder


def let_go() -> None:
    """End the use of what this process made by `new_folder`; a folder with a configuration alone is removed."""
    while _made:
        folder = _made.pop()
        os.environ.pop(HANDED_ON, None)
        with suppress(OSError):
            written = {path.name for path in folder.iterdir()} - {CONFIG_FILE, LOG_FILE}
            if written and (written != {"checkpoints"} or any((folder / "checkpoints").iterdir())):
                continue
            shutil.rmtree(folder)
            for above in folder.parents[:-1]:
                above.rmdir()  # ends at the first that is not empty


def check_place(run_folder: Path) -> None:
    """Raise `ConfigError` for a run folder that cannot be made or written; nothing is made to find out."""
    for place in (run_folder.absolute(), *run_folder.absolute().parents):
        was_there = os.path.lexists(place)
        try:
            with tempfile.TemporaryFile(dir=place):
                return
        except OSError as error:  # what is not there, or not for the whole time, is made in the folder above
            if not isinstance(error, FileNotFoundError) or (was_there and os.path.lexists(place)):
                raise _unwritable(run_folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "The run folder cannot be written.",
        expected="a folder that you may write to",
        given=f"{folder} ({error.strerror})",
        remedy="Set trainer.default_root_dir to another place.",
    )


def meant(given: Path, runs: Path = Path("runs")) -> str:
    """Return a sentence that names the runs in a folder, else those beside it, else all, the newest first.

    Args:
        given: a folder that is no run: one that holds runs, a misspelt one, or any other.
        runs: where runs are when none is near `given`.
    """
    places = (given, given.parent, runs)
    near = ([one for one in (*place.glob("*"), *place.glob("*/*")) if is_run(one)] for place in places)
    found = next(filter(None, near), [])
    if len(found) < 2:
        return f"Did you mean {found[0]}?" if found else "lit-qrl fit makes one, under runs/."
    return f"Choose one of {listed(map(str, reversed(oldest_first(found))))}."


LOCK_FILE, HOLDER_FILE = ".lock", ".lock.json"
"""The lock, which the system frees with the process that holds it, and who that is."""
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks answers."""


class RunLock:
    """Holds a run folder for this process.

    The lock is the operating system's, so one left by a process that died is free; the file that names the holder is
    read only while the lock is held.
    """

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def take(self, folder: Path) -> None:
        """Take the folder, or say who has it.

        Raises:
            ConfigError: while another training runs there.
        """
        self.release()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.absolute() / LOCK_FILE, timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise ConfigError(
                f"Another training runs in {folder}.",
                expected="a folder of its own for each run",
                given=_holder(folder),
                remedy="Wait for it, stop it, or set trainer.default_root_dir to another folder.",
            ) from error
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS:
                raise _unwritable(folder, error) from error
            return
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with named(folder / HOLDER_FILE):
            (folder / HOLDER_FILE).write_text(json.dumps(me))
        self._lock = lock

    def release(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            folder = Path(self._lock.lock_file).parent
            for name in (HOLDER_FILE, LOCK_FILE):  # before it is free, so that no other's is removed
                with suppress(OSError):
                    (folder / name).unlink()
            self._lock.release()
            self._lock = None


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / HOLDER_FILE).read_text())
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError):
        return "a process that has just begun"
