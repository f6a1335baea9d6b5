"""Fixtures of all rooms."""

from tests.format_rows import format_rows  # noqa: F401
