import os
import signal

import pytest

from lit_qrl.run.interrupt import Interrupted, Interruption


@pytest.fixture
def interruption():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made = Interruption()
    made.install()
    yield made
    made.remove()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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


def test_nothing_is_raised_where_nothing_came(interruption):
    interruption.defer()
    interruption.resume()
    interruption.install()  # a second time changes nothing


def test_a_second_run_does_not_end_by_the_signal_of_the_first(interruption):
    interruption.defer()
    os.kill(os.getpid(), signal.SIGTERM)
    interruption.remove()
    interruption.install()
    assert interruption.pending is None
    interruption.resume()
