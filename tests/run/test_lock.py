import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.run.folder import RunLock

HOLD = "import sys, time; from pathlib import Path; from lit_qrl.run.folder import RunLock; lock = RunLock(); \
lock.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(120)"


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_the_lock_of_a_process_that_died_is_taken_over(tmp_path, holder):
    with pytest.raises(ConfigError, match=f"process {holder.pid} on {socket.gethostname()}, since 20"):
        RunLock().take(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    lock = RunLock()
    lock.take(tmp_path)
    assert str(os.getpid()) in (tmp_path / ".lock.json").read_text()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_let_go_is_free(tmp_path):
    first, second = RunLock(), RunLock()
    first.take(tmp_path / "new")
    with pytest.raises(ConfigError, match="Another training runs"):
        second.take(tmp_path / "new")
    first.release()
    first.release()
    second.take(tmp_path / "new")
    second.release()


def test_a_file_system_without_locks_is_gone_on_with_and_one_that_fails_is_named(tmp_path, monkeypatch):
    def acquire(number):
        def refuse(lock):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("lit_qrl.run.folder.FileLock.acquire", refuse)

    acquire(errno.ENOLCK)
    lock = RunLock()
    lock.take(tmp_path)
    lock.release()
    acquire(errno.EIO)
    with pytest.raises(ConfigError, match=r"cannot be written.*Input/output error"):
        RunLock().take(tmp_path)
