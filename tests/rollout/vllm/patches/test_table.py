"""The list is whole, and what it names is there in the installed vLLM."""

import sys
from pathlib import Path

import pytest

from lit_qrl.rollout.vllm import patches
from lit_qrl.rollout.vllm.installation import RUN_WITH, installed_version
from lit_qrl.rollout.vllm.patches import table
from lit_qrl.rollout.vllm.patches.patch import find


def test_every_file_is_one_patch_and_says_what_it_is_about():
    files = {path.stem for path in Path(patches.__file__).parent.glob("*.py")} - {"__init__", *table.MACHINERY}
    assert [patch.name for patch in table.PATCHES] == sorted(files)
    for patch in table.PATCHES:
        assert sys.modules[patch.file].__doc__
        assert patch.changes or patch.needs


def test_every_patch_is_for_some_version_that_was_run():
    for patch in table.PATCHES:
        assert any(patch.concerns((*one, 0), device) for one in RUN_WITH for device in ("cpu", "cuda"))


def test_those_are_applied_that_the_installed_version_needs(install, monkeypatch):
    applied = []

    class Recorded:
        def __init__(self, wanted):
            self.wanted = wanted

        def concerns(self, version, device):
            return self.wanted and version == (0, 32, 0)

        def apply(self, version):
            applied.append(self)

    mine = (Recorded(True), Recorded(False), Recorded(True))
    monkeypatch.setattr(table, "PATCHES", mine)
    install("0.32.0", cpu=True)
    table.apply_all()
    assert applied == [mine[0], mine[2]]


@pytest.mark.vllm
def test_what_the_patches_need_is_in_the_installed_vllm():
    version, _ = installed_version()
    mine = [patch for patch in table.PATCHES if version in patch.versions]
    assert mine
    for patch in mine:
        for symbol in (*patch.changes, *patch.needs):
            find(symbol)
