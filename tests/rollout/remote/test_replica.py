"""A replica's process: started, ended, and gone."""

import os
import subprocess
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.remote import replica, wire
from lit_qrl.rollout.remote.replica import Place, Replica
from tests.rollout.remote.served import TOKEN, server

# A process that does what the server's does at its start, without the seconds that imports take.
ECHO = "import sys; sys.stdin.readline(); print({}, flush=True); sys.stdin.read()"


def of_script(monkeypatch, script):
    import sys

    monkeypatch.setattr(replica, "COMMAND", (sys.executable, "-c", script))
    return Replica(Place("cpu"), TransformersEngine())


def test_a_process_that_does_not_start_is_a_death(monkeypatch):
    one = of_script(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(EngineDiedError, match="on cpu ended with status 3"):
        one.open()
    one.close()


def test_a_process_ends_with_its_run(monkeypatch):
    one = of_script(monkeypatch, ECHO.format(1))
    one.start()
    process = one._process
    assert one._port() == 1
    one.close()
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_process_of_the_cpu_sees_no_gpu(monkeypatch):
    one = of_script(monkeypatch, "import os, sys; print(len(os.environ['CUDA_VISIBLE_DEVICES']) + 7, flush=True)")
    one.start()
    assert one._port() == 7
    one.close()


def test_answers_of_a_call_that_was_interrupted_are_passed_over():
    with server() as place:
        one = Replica(Place(place, TOKEN), TransformersEngine())
        one.open()
        one.begin("read_back", "one")
        assert one.call("check_routes", "this test") is None
        assert one._early == []
        one.close()


def test_what_is_asked_of_a_replica_that_is_gone_is_its_death():
    one = Replica(Place("127.0.0.1:1", TOKEN), TransformersEngine())
    with pytest.raises(EngineDiedError, match=r"127\.0\.0\.1:1 is gone"):
        one.call("score", [[1]])
    assert one.dead


def test_each_thread_that_hears_of_a_death_tells_its_cause():
    one = Replica(Place("cpu"), TransformersEngine())
    one._process = subprocess.Popen(["sleep", "60"])
    one._connection = held = SimpleNamespace(hang_up=lambda: None)
    one._process.kill()
    first, later = one._died(held, "EOFError"), one._died(held, "OSError")
    assert str(first) == str(later)
    for call in (lambda: one.call("score", [[1]]), lambda: one.begin("score", [[1]])):
        with pytest.raises(EngineDiedError, match="on cpu ended with status -9: EOFError"):
            call()


def test_a_server_that_was_there_and_is_started_again_is_waited_for():
    with server() as place:
        one = Replica(Place(place, TOKEN), TransformersEngine())
        one.open()
    one.restart()
    again = ExitStack()
    port = int(place.rpartition(":")[2])
    starting = threading.Timer(1.0, lambda: again.enter_context(server(port=port)))
    starting.start()
    with again:
        one.open()
        assert not one.dead
        one.close()
        starting.join()


def test_a_server_that_was_there_and_is_gone_is_a_death_and_no_setting(monkeypatch):
    monkeypatch.setattr(wire, "AGAIN", 0.1)
    with server() as place:
        one = Replica(Place(place, TOKEN), TransformersEngine())
        one.open()
    one.restart()
    with pytest.raises(EngineDiedError, match="cannot be reached"):
        one.open()
