import socket
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from lit_qrl.network import hub
from lit_qrl.network.hub import ask_hub, why_unreachable

ENDPOINT = "https://hub.invalid"


@pytest.fixture(autouse=True)
def online(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", ENDPOINT)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(config=SimpleNamespace(HF_HUB_OFFLINE=False)))
    why_unreachable.cache_clear()
    yield
    why_unreachable.cache_clear()


@pytest.fixture
def connecting(monkeypatch):
    def use(answer):
        def connect(address, timeout, all_errors):
            asked.append(address)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(close=lambda: None)

        asked = []
        monkeypatch.setattr(hub.socket, "create_connection", connect)
        return asked

    return use


def test_a_hub_that_cannot_be_reached_is_asked_once_and_never_waited_for(connecting, capsys):
    asked = connecting(socket.gaierror(-2, "Name or service not known"))
    ask_hub("the model 'org/name'")
    assert capsys.readouterr().err == (
        "Asking https://hub.invalid for the model 'org/name' …\n"
        "It cannot be reached ([Errno -2] Name or service not known). Only what was fetched before can be taken.\n"
    )
    assert constants.is_offline_mode()
    assert sys.modules["datasets"].config.HF_HUB_OFFLINE
    assert hub.os.environ["HF_HUB_OFFLINE"] == "1"
    ask_hub("the data set 'org/rows'")
    assert (asked, capsys.readouterr().err) == ([("hub.invalid", 443)], "")


def test_a_hub_that_can_be_reached_is_asked_aloud(connecting, capsys):
    asked = connecting(None)
    ask_hub("the model 'org/name'")
    ask_hub("the tokenizer 'org/name'")
    assert capsys.readouterr().err.splitlines()[1] == "Asking https://hub.invalid for the tokenizer 'org/name' …"
    assert len(asked) == 1
    assert not constants.is_offline_mode()
    assert "HF_HUB_OFFLINE" not in hub.os.environ


@pytest.mark.parametrize(
    "errors, expected",
    [
        (
            [OSError(101, "Network is unreachable"), ConnectionRefusedError(111, "no")],
            "[Errno 101] Network is unreachable",
        ),
        ([OSError(101, "Network is unreachable"), TimeoutError("timed out")], None),
    ],
)
def test_one_address_that_may_be_slow_is_left_to_the_library(connecting, errors, expected):
    connecting(ExceptionGroup("create_connection failed", errors))
    assert why_unreachable(ENDPOINT) == expected


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "all_proxy"])
def test_behind_a_proxy_nothing_is_known(connecting, monkeypatch, name):
    asked = connecting(socket.gaierror(-2, "Name or service not known"))
    monkeypatch.setenv(name, "http://proxy:3128")
    assert why_unreachable(ENDPOINT) is None
    assert asked == []


def test_a_port_of_its_own(connecting):
    asked = connecting(None)
    assert why_unreachable("http://mirror:8080") is None
    assert why_unreachable("http://mirror") is None
    assert asked == [("mirror", 8080), ("mirror", 80)]
