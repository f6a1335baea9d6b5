"""What a server answers, and what it does not do."""

import runpy

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.remote import server
from lit_qrl.rollout.remote.replica import Place, Replica
from tests.rollout.remote.served import TOKEN
from tests.rollout.remote.served import server as served


def test_only_what_an_engine_does_can_be_asked_for():
    with served() as place:
        one = Replica(Place(place, TOKEN), TransformersEngine())
        one.open()
        with pytest.raises(ValueError, match="'__init__' is nothing that a run may ask"):
            one.call("__init__")
        assert one.call("close") is None
        one.close()


def test_an_error_says_where_it_comes_from():
    try:
        raise ConfigError("A key is wrong.", expected="another")
    except ConfigError as error:
        again = server.portable(error)
    assert type(again) is ConfigError
    assert again.expected == "another"
    assert "In the engine's process" in again.__notes__[0]
    assert "test_server.py" in again.__notes__[0]


def test_an_error_that_cannot_travel_is_told_in_words():
    class OwnError(Exception):
        pass

    again = server.portable(OwnError("so it was"))
    assert type(again) is RuntimeError
    assert str(again) == "OwnError: so it was"
    assert type(server.portable(EngineDiedError("dead"))) is EngineDiedError


def test_a_process_of_its_own_raises_errors_that_the_run_has_too(monkeypatch):
    served = []
    monkeypatch.setattr(server, "main", lambda: served.append(server.Session.__module__))
    runpy.run_path(server.__file__, run_name="__main__")
    assert served == ["lit_qrl.rollout.remote.server"]


def test_a_message_that_cannot_be_read_ends_the_session_and_not_the_server():
    with served() as place:
        one = Replica(Place(place, TOKEN), TransformersEngine())
        one.open()
        one._connection.connection.send_bytes(b"no pickle")
        with pytest.raises(EngineDiedError):
            one.call("check_routes", "this test")
        one.restart()
        one.open()
        assert one.call("check_routes", "this test") is None
        one.close()
