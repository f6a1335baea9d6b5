"""Rows of the table of what formats can do, changed for a test."""

from dataclasses import replace

import pytest

from lit_qrl import formats
from lit_qrl.formats import support


def override(name, **changes):
    """Change fields of a format's row; return what takes it back."""
    before = support.TABLE[name]
    support.TABLE[name] = replace(before, **changes)
    return lambda: support.TABLE.__setitem__(name, before)


@pytest.fixture
def format_rows(monkeypatch):
    """`format_rows(name, field=value, …)` changes a row, and `formats.register` adds one, until the test ends."""
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    before = dict(support.TABLE)
    yield override
    support.TABLE.clear()
    support.TABLE.update(before)
