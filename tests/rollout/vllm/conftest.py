import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def fake(monkeypatch):
    """Put a namespace in the place of a module, of vLLM or of none, and return it."""

    def make(name, **attributes):
        module = SimpleNamespace(__name__=name, **attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make
