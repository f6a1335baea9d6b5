"""One training at a time in a run folder."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lit_qrl.errors import ConfigError

LOCK_FILE, HOLDER_FILE = ".lock", ".lock.json"
"""The lock, which the system frees with the process that holds it, and who that is."""


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
        lock = FileLock(folder / LOCK_FILE, timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise ConfigError(
                f"Another training runs in {folder}.",
                expected="a folder of its own for each run",
                given=_holder(folder),
                remedy="Wait for it, stop it, or set trainer.default_root_dir to another folder.",
            ) from error
        except NotImplementedError:  # a file system without locks
            return
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
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


def holder_lives(folder: Path) -> bool | None:
    """Return whether the process that took a run folder is alive; None where nobody says who that is.

    A folder that was let go names nobody, and a process of another host cannot be asked.
    """
    try:
        holder = json.loads((folder / HOLDER_FILE).read_text())
        pid, host = int(holder["pid"]), holder["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host != socket.gethostname() or pid < 1:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return True


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / HOLDER_FILE).read_text())
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError):
        return "a process that has just begun"
