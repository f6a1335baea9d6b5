"""Who is let in, and what the others are told."""

import socket
import threading
import time

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.remote import wire
from tests.rollout.remote.served import TOKEN, server


def address(place):
    host, port = place.split(":")
    return host, int(port)


def test_a_wrong_token_is_refused_and_the_next_run_served():
    with server() as place:
        with pytest.raises(ConfigError, match="does not take this run's token"):
            wire.connect(*address(place), b"another")
        connection = wire.connect(*address(place), TOKEN)
        connection.close()


def test_the_token_itself_does_not_travel(monkeypatch):
    seen = []
    listener = wire.listen("127.0.0.1", 0)

    def overhear():
        accepted, _ = listener.accept()
        accepted.sendall(b"\x00\x00\x00\x20#CHALLENGE#{sha256}" + b"x" * 13)
        seen.append(accepted.recv(4096))
        accepted.close()

    thread = threading.Thread(target=overhear)
    thread.start()
    with pytest.raises(ConfigError):
        wire.connect(*listener.getsockname(), TOKEN)
    thread.join()
    listener.close()
    assert seen
    assert TOKEN not in seen[0]


@pytest.mark.parametrize("name", ["lit-qrl", "vllm"])
def test_other_versions_are_refused_by_name(monkeypatch, name):
    mine = {"vllm": "0.26.0", **wire.versions()}
    theirs = {**mine, name: "0.0.1"}
    answers = iter([mine, theirs, mine, theirs])  # of run and server in turn
    lock = threading.Lock()

    def told():
        with lock:
            return next(answers)

    monkeypatch.setattr(wire, "versions", told)
    with server() as place, pytest.raises(ConfigError, match=f"{name} .* in the run and 0.0.1 in the server"):
        wire.connect(*address(place), TOKEN)


def test_what_only_one_side_has_is_no_difference():
    assert wire.skew({"torch": "2.11", "vllm": "0.26"}, {"torch": "2.11", "transformers": "5"}) == ""


def test_nobody_there_is_named_with_the_place():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be reached"):
        wire.connect("127.0.0.1", port, TOKEN)


def test_a_server_that_says_nothing_is_named_in_time(monkeypatch):
    monkeypatch.setattr(wire, "CONNECT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as held:
        start = time.monotonic()
        with pytest.raises(ConfigError, match=r"no free engine's server.*Given: no word"):
            wire.connect(*held.getsockname(), TOKEN)
        assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("said", "given"),
    [(b"", "a connection that was closed at once"), (b"SSH-2.0-OpenSSH\r\n", "Error"), (b"\0\0\0\4what", "Error")],
)
def test_another_server_is_told_from_a_wrong_token(said, given):
    listener = wire.listen("127.0.0.1", 0)

    def speak():
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(said)

    thread = threading.Thread(target=speak)
    thread.start()
    with pytest.raises(ConfigError, match=f"no free engine's server.*{given}"):
        wire.connect(*listener.getsockname(), TOKEN)
    thread.join()
    listener.close()


def test_a_stranger_that_says_nothing_does_not_keep_the_server(monkeypatch):
    monkeypatch.setattr(wire, "ADMIT", 1.0)
    with server() as place, socket.create_connection(address(place)):
        wire.connect(*address(place), TOKEN).close()


def test_strangers_are_no_pickles():
    with server() as place:
        with socket.create_connection(address(place)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        wire.connect(*address(place), TOKEN).close()


def test_a_port_in_use_is_one_paragraph():
    with socket.create_server(("127.0.0.1", 0)) as held, pytest.raises(ConfigError, match="a port that nobody uses"):
        wire.listen("127.0.0.1", held.getsockname()[1])


def test_a_port_that_cannot_be_is_one_paragraph():
    with pytest.raises(ConfigError, match=r"cannot listen.*127\.0\.0\.1:99999 .*0-65535"):
        wire.listen("127.0.0.1", 99999)


def test_a_token_comes_from_a_file_that_is_there_and_not_empty(tmp_path):
    (tmp_path / "token").write_text("  secret\n")
    assert wire.read_token(tmp_path / "token") == b"secret"
    (tmp_path / "token").write_text("\n")
    for path in (tmp_path / "token", tmp_path / "none"):
        with pytest.raises(ConfigError, match="token of the engine's server cannot be read"):
            wire.read_token(path)
