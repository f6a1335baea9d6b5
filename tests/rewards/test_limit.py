import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from lit_qrl.rewards import limit
from lit_qrl.rewards.limit import call


def spin():
    while True:
        pass


def backtrack():
    return re.fullmatch("(a|a)*b", "a" * 60)


@pytest.mark.parametrize("hang", [spin, backtrack, lambda: time.sleep(60), threading.Event().wait, lambda: 9**9**9])
def test_what_hangs_is_interrupted_and_the_next_call_works(hang):
    with pytest.raises(TimeoutError, match=r"not done within 0\.1 s"):
        call(hang, seconds=0.1)
    assert call(lambda: 5, seconds=5) == 5


def test_code_that_swallows_the_interruption_is_interrupted_again(monkeypatch):
    monkeypatch.setattr(limit, "REPEAT", 0.05)

    def stubborn():
        try:
            spin()
        except:  # noqa: E722
            spin()

    with pytest.raises(TimeoutError):
        call(stubborn, seconds=0.05)


def test_an_error_of_the_call_is_its_own():
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 / 0, seconds=5)
    with pytest.raises(TimeoutError, match="the service"):  # one that the code itself raises
        call(lambda: (_ for _ in ()).throw(TimeoutError("the service")), seconds=5)


def test_the_clock_of_others_goes_on():
    rang = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    before = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        call(lambda: None, seconds=60)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0 or rang
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, previous)


def test_in_another_thread_a_late_call_is_abandoned():
    outcomes = []

    def run():
        try:
            call(lambda: time.sleep(60), seconds=0.1)
        except TimeoutError as error:
            outcomes.append(str(error))
        outcomes.append(call(lambda: 5, seconds=5))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert outcomes == ["not done within 0.1 s", 5]


def test_native_code_that_cannot_be_interrupted_ends_the_process_with_its_line():
    code = (
        "import ctypes, lit_qrl.rewards.limit as limit; limit.GRACE = 0.2;"
        "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64);"  # keeps the interpreter
        "print('before', flush=True); limit.call(lambda: [lock(mutex), lock(mutex)], seconds=0.1)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stdout == "before\n"
    assert 'File "<string>", line 1 in <lambda>' in ended.stderr


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_child_that_returns_ends_and_its_parent_goes_on(seconds):
    code = (
        "import os, threading; from lit_qrl.rewards.limit import call\n"
        f"def work(): print(call(lambda: os.fork() and 5, seconds={seconds}), flush=True)\n"
        "work(); thread = threading.Thread(target=work); thread.start(); thread.join()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "5\n5\n"
    assert ended.stderr.count("the child returned: it ends here") == 2


HANGS = {
    "loop": "call(loop, seconds=600)",
    "held": "call(hold, seconds=600)",
    "concurrent": "FunctionReward(hold_all, concurrency=2, timeout=600)(SAMPLES)",
    "apart": "FunctionReward(hold_all, processes=True)(SAMPLES)",
}


def hold_all(completions):
    re.match(r"(a+)+$", "a" * 60 + "b")


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_a_signal_ends_what_hangs(hang):
    code = (
        "import signal, sys; from lit_qrl.rewards import FunctionReward, Sample\n"
        "from tests.rewards.test_limit import call, hold_all, spin as loop\n"
        "hold = lambda: hold_all([]); SAMPLES = [Sample('', '')] * 2\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print('in', flush=True)\n"
        f"{hang}"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert run.stdout.readline() == b"in\n"
    time.sleep(2)
    run.terminate()
    assert run.wait(60) == 143
    run.stdout.close()
