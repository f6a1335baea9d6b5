import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, utils

from lit_qrl.network import hub
from lit_qrl.network.hub import ask_hub, why_unreachable

ENDPOINT = "https://hub.invalid"


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that what is set is taken back
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", ENDPOINT)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(config=SimpleNamespace(HF_HUB_OFFLINE=False)))
    why_unreachable.cache_clear()
    yield
    why_unreachable.cache_clear()


@pytest.fixture
def connecting(monkeypatch):
    def use(answer):
        def head(endpoint, timeout):
            asked.append(endpoint)
            if answer is not None:
                raise answer

        asked = []
        monkeypatch.setattr(utils, "get_session", lambda: SimpleNamespace(head=head))
        return asked

    return use


def test_a_hub_that_cannot_be_reached_is_asked_once_and_never_waited_for(connecting, capsys):
    asked = connecting(ConnectionError("[Errno -2] Name or service not known"))
    ask_hub("the model 'org/name'")
    assert capsys.readouterr().err == (
        "Asking https://hub.invalid for the model 'org/name' …\n"
        "It cannot be reached ([Errno -2] Name or service not known). Only what was fetched before can be taken.\n"
    )
    assert constants.is_offline_mode()
    assert sys.modules["datasets"].config.HF_HUB_OFFLINE
    assert hub.os.environ["HF_HUB_OFFLINE"] == "1"
    ask_hub("the data set 'org/rows'")
    assert (asked, capsys.readouterr().err) == ([ENDPOINT], "")


def test_a_hub_that_can_be_reached_is_asked_aloud(connecting, capsys):
    asked = connecting(None)
    ask_hub("the model 'org/name'")
    ask_hub("the tokenizer 'org/name'")
    assert capsys.readouterr().err.splitlines()[1] == "Asking https://hub.invalid for the tokenizer 'org/name' …"
    assert len(asked) == 1
    assert not constants.is_offline_mode()
    assert "HF_HUB_OFFLINE" not in hub.os.environ


def test_one_that_does_not_answer_in_time_may_later(connecting):
    connecting(TimeoutError("timed out"))
    assert why_unreachable(ENDPOINT) is None
