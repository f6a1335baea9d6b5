"""Steps that never return: interrupted where Python can be, and the end of the process where it cannot."""

import signal
import threading
import time

import pytest

from lit_qrl.rollout.vllm.watchdog import EXIT_HUNG, Watchdog
from tests.forked import run_each


def test_a_lock_and_a_busy_loop_are_interrupted_too():
    lock = threading.Lock()
    lock.acquire()

    def spin():
        while True:
            pass

    for step in (lock.acquire, spin):
        with pytest.raises(TimeoutError), Watchdog(0.1):
            step()


def test_steps_in_time_are_left_alone():
    with Watchdog(1.5, grace=1.5) as watchdog:
        for _ in range(5):
            watchdog.beat()
            time.sleep(0.4)


def test_the_users_signal_handler_comes_back():
    def own(number, frame):
        pass

    before = signal.signal(signal.SIGUSR2, own)
    try:
        with Watchdog(60):
            assert signal.getsignal(signal.SIGUSR2) is not own
        assert signal.getsignal(signal.SIGUSR2) is own
    finally:
        signal.signal(signal.SIGUSR2, before)


IMPORTS = """
import ctypes, os, pathlib
from lit_qrl.rollout.vllm import folder as model_folder
from lit_qrl.rollout.vllm.watchdog import Watchdog
"""
STUCK = """
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
with Watchdog(0.2, on_hang=lambda sentence: {words}, grace=0.5):
    lock(mutex)
    lock(mutex)  # waits for itself in native code, which no signal ends
print("went on")
"""
SAID = 'print("last words:", sentence, flush=True)'
FOLDER = """
folder = pathlib.Path(os.environ["FOLDERS"], "lit-qrl-vllm-1")
folder.mkdir()
model_folder._made[folder] = os.getpid()
"""
PROGRAMS = {
    "says": STUCK.format(words=SAID),
    "has a folder": FOLDER + STUCK.format(words=SAID),
    "fails to say": STUCK.format(words="1 / 0"),
    "hangs when it says": STUCK.format(words="lock(mutex)"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def ended(folders, tmp_path_factory):
    """How each program ended."""
    done = run_each(IMPORTS, list(PROGRAMS.values()), tmp_path_factory.mktemp("said"), FOLDERS=str(folders))
    return dict(zip(PROGRAMS, done, strict=True))


def test_native_code_that_never_returns_ends_the_process_with_last_words(ended):
    assert ended["says"].returncode == EXIT_HUNG
    assert ended["says"].stdout.startswith("last words: The engine hangs: one step took longer than 0.2 s")


def test_a_process_that_ends_so_leaves_no_folder_of_an_engine(ended, folders):
    done = ended["has a folder"]
    assert done.returncode == EXIT_HUNG
    assert not list(folders.iterdir())
    assert "went on" not in done.stdout
    assert "most recent call first" in done.stderr


@pytest.mark.parametrize("how", ["fails to say", "hangs when it says"])
def test_last_words_that_fail_or_hang_do_not_keep_the_process(ended, how):
    assert ended[how].returncode == EXIT_HUNG
