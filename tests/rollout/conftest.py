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
