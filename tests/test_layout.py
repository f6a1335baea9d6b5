"""Tests mirror the source: lit_qrl/<path>/name.py is tested by tests/<path>/test_name.py, _name.py by test__name.py."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# No file of their own: what they hold is tested elsewhere, for the reason given.
EXCEPTIONS: dict[str, str] = {}
SOURCES = sorted(path for path in (ROOT / "lit_qrl").rglob("*.py") if path.name != "__init__.py")


def mirror(source: Path) -> Path:
    relative = source.relative_to(ROOT / "lit_qrl")
    return ROOT / "tests" / relative.parent / f"test_{relative.name}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_file_has_its_test_file(source):
    name = str(source.relative_to(ROOT))
    there = mirror(source).is_file() and "def test_" in mirror(source).read_text()
    assert there != (name in EXCEPTIONS), f"expected tests in {mirror(source).relative_to(ROOT)}"


def test_exceptions_exist():
    assert set(EXCEPTIONS) <= {str(source.relative_to(ROOT)) for source in SOURCES}
