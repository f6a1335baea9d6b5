import os
import signal
import threading
import time

import pytest

from lit_qrl.run import interrupt
from lit_qrl.run.interrupt import SIGNALS, Cut, Interrupted, Interruption


@pytest.fixture
def interruption():
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    before = [signal.getsignal(number) for number in SIGNALS]
    made = Interruption()
    made.install()
    yield made
    made.remove()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    signal.signal(signal.SIGHUP, ignored)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_raises_at_once_and_tells_the_status(interruption, number, status):
    with pytest.raises(Interrupted) as raised:
        os.kill(os.getpid(), number)
    assert raised.value.status == status
    assert isinstance(raised.value, KeyboardInterrupt)


def test_what_comes_while_it_is_put_off_is_raised_afterwards(interruption, capsys):
    interruption.defer()
    os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.pending == signal.SIGTERM
    assert "once more ends the run at once" in capsys.readouterr().out
    with pytest.raises(Interrupted, match="SIGTERM"):
        interruption.resume()


def test_a_second_signal_is_not_put_off(interruption):
    interruption.defer()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)
    interruption.remove()
    interruption.install()  # the next run does not end by what came in this one
    interruption.install()  # a second time changes nothing
    assert interruption.pending is None
    interruption.defer()
    interruption.resume()
    interruption.remove()
    interruption.pass_on(signal.SIGTERM)  # nor the process by what comes afterwards
    assert interruption.pending is None


@pytest.fixture
def among_several():
    made, told = Interruption(), []
    made.install(together=True, tell=told.append)
    yield made, told
    made.remove()


def test_the_first_signal_of_one_of_several_is_told_and_cuts_what_it_draws(among_several, monkeypatch):
    made, told = among_several
    os.kill(os.getpid(), signal.SIGTERM)  # in a collective: noted alone
    assert (made.pending, told) == (signal.SIGTERM, [signal.SIGTERM])
    with pytest.raises(Cut), made.cut():
        pytest.fail("it begins nothing any more")
    os.kill(os.getpid(), signal.SIGTERM)  # a terminal tells all processes, and torchrun those that it started
    monkeypatch.setattr(interrupt, "ECHO", 0.0)
    with pytest.raises(Interrupted) as raised:
        os.kill(os.getpid(), signal.SIGTERM)
    assert not isinstance(raised.value, Cut)  # which ends this process, whatever the others do


def test_a_signal_that_another_process_got_wakes_the_main_thread_and_is_not_told_again(among_several):
    made, told = among_several
    threading.Timer(0.1, made.pass_on, [signal.SIGTERM]).start()
    with pytest.raises(Cut), made.cut():
        time.sleep(60)
    assert (made.pending, told) == (signal.SIGTERM, [])
    os.kill(os.getpid(), signal.SIGTERM)  # what started all of them sends it to each: this one's first
    assert told == [signal.SIGTERM]


def test_a_run_under_nohup_outlives_its_terminal():
    before, made = signal.signal(signal.SIGHUP, signal.SIG_IGN), Interruption()
    made.install()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert made.pending is None
    finally:
        made.remove()
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
