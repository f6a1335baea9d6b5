"""Seconds are those of a clock that the test turns on."""

import pytest

from lit_qrl.receipts import clock as module
from lit_qrl.receipts.clock import Clock


@pytest.fixture
def turn(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def test_a_part_inside_another_is_not_in_that_ones_seconds(turn):
    clock = Clock()
    with clock.part("load"):
        turn(1.0)
        with clock.part("wait"):
            turn(2.0)
            with clock.part("take"):
                turn(4.0)
        with clock.part("wait"):
            turn(8.0)
        turn(16.0)
    assert clock.seconds == {"load": 17.0, "wait": 10.0, "take": 4.0}


def test_making_a_stream_is_told_from_what_is_done_with_it(turn):
    def made():
        for number in range(3):
            turn(1.0)
            yield number
        turn(0.5)

    clock, got = Clock(), []
    with clock.part("load"):
        for number in clock.stream("make", made()):
            turn(10.0)
            got.append(number)
    assert got == [0, 1, 2]
    assert clock.seconds == {"make": 3.5, "load": 30.0}


def test_what_a_stream_raises_comes_through_and_its_seconds_count(turn):
    def broken():
        turn(1.0)
        yield 0
        turn(2.0)
        raise ValueError("broken")

    clock = Clock()
    with pytest.raises(ValueError, match="broken"), clock.part("load"):
        list(clock.stream("make", broken()))
    assert clock.seconds == {"make": 3.0, "load": 0.0}
