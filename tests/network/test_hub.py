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


UNREACHABLE, SLOW = OSError(101, "Network is unreachable"), TimeoutError("timed out")


@pytest.mark.parametrize(
    ("endpoint", "answer", "proxy", "expected", "addresses"),
    [
        (
            ENDPOINT,
            ExceptionGroup("failed", [UNREACHABLE, ConnectionRefusedError(111, "no")]),
            None,
            str(UNREACHABLE),
            1,
        ),
        (ENDPOINT, ExceptionGroup("failed", [UNREACHABLE, SLOW]), None, None, 1),  # one that may be slow
        (ENDPOINT, UNREACHABLE, "HTTPS_PROXY", None, 0),  # behind which nothing is known
        (ENDPOINT, UNREACHABLE, "all_proxy", None, 0),
        ("http://mirror:8080", None, None, None, ("mirror", 8080)),
        ("http://mirror", None, None, None, ("mirror", 80)),
    ],
)
def test_an_address_is_unreachable_where_every_way_to_it_is(
    endpoint, answer, proxy, expected, addresses, connecting, monkeypatch
):
    asked = connecting(answer)
    if proxy:
        monkeypatch.setenv(proxy, "http://proxy:3128")
    assert why_unreachable(endpoint) == expected
    assert asked == ([addresses] if isinstance(addresses, tuple) else [("hub.invalid", 443)] * addresses)
