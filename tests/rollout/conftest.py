import importlib.util
from types import SimpleNamespace

import pytest


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Pretend that a vLLM is installed: its version, and whether it is the CPU build."""

    def pretend(version, cpu):
        folder = tmp_path / "vllm"
        folder.mkdir()
        (folder / "_version.py").write_text(f"__version__ = version = '{version}'\n")
        if cpu:
            (folder / "_C_AVX2.abi3.so").touch()
        spec = SimpleNamespace(origin=str(folder / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)

    return pretend


@pytest.fixture
def built():
    """Return `build_engine` of `tests.vllm_engines`, whose engines end with the test."""
    from tests.vllm_engines import build_engine

    made = []

    def build(*args, **options):
        made.append(build_engine(*args, **options))
        return made[-1]

    yield build
    for engine in reversed(made):
        engine.close()
