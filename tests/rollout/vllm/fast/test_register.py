"""The plug-in as vLLM loads it: what fits is changed, what does not is left out with one line."""

import logging
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import lit_qrl_vllm_fast
import pytest

from lit_qrl.rollout.vllm.installation import PACKAGE, PLUGIN, installed_version
from lit_qrl.rollout.vllm.patches import Patch, digest

FOLDER = Path(__file__).parents[4] / "packages" / "vllm_fast"


def counted(made):
    """A change of the module that stands in for vLLM's."""
    return lambda original: lambda: made.append("changed") or original()


def changes(made, source):
    build = {"wrong": "slow", "seen": "by a clock"}
    return (
        Patch("fits", changes={"vllm.part:one": counted(made)}, sources={"vllm.part:two": [source]}, **build),
        Patch("renamed", changes={"vllm.part:gone": counted(made)}, **build),
        Patch("rewritten", changes={"vllm.part:one": counted(made)}, sources={"vllm.part:two": ["00"]}, **build),
        Patch("mended", changes={"vllm.part:gone": counted(made)}, fixed="0.32", **build),
    )


def one():
    return 1


def two():
    """Two."""
    return 2


def test_what_does_not_fit_is_left_out_with_one_line(fake, install, monkeypatch, caplog):
    made = []
    module = fake("vllm.part", one=one, two=two)
    monkeypatch.setattr(lit_qrl_vllm_fast, "CHANGES", changes(made, digest("vllm.part:two")))
    install("0.33.1", cpu=True)
    with caplog.at_level(logging.WARNING, "lit_qrl_vllm_fast"):
        for _ in range(2):
            lit_qrl_vllm_fast.register()
    assert module.one() == 1
    assert made == ["changed"]
    (line, again) = caplog.messages
    assert line == again
    assert f"{PACKAGE} leaves out what does not fit vLLM 0.33.1" in line
    assert "renamed (vllm.part.gone is not there" in line
    assert "rewritten (vllm.part.two is of another source" in line
    assert "mended" not in line


def test_a_module_that_cannot_be_imported_ends_no_engine(monkeypatch):
    def broken(module):
        raise RuntimeError("no device")

    monkeypatch.setattr("lit_qrl.rollout.vllm.patches.import_module", broken)
    assert lit_qrl_vllm_fast.CHANGES[0].misfit().endswith("is not there (no device)")


def test_a_source_is_known_by_what_it_does_not_by_its_docstring(fake):
    fake("vllm.part", two=two)
    known = digest("vllm.part:two")
    namespace = fake("vllm.part", two=lambda: 3)
    assert digest("vllm.part:two") != known
    namespace.two = two
    assert digest("vllm.part:two") == known


def test_names_are_the_plug_in_s():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    assert project["name"] == PACKAGE
    assert project["entry-points"]["vllm.general_plugins"] == {PLUGIN: "lit_qrl_vllm_fast:register"}


@pytest.mark.vllm
def test_vllm_loads_it_and_all_of_it_fits_the_versions_that_were_run(caplog):
    assert PLUGIN in {one.name for one in entry_points(group="vllm.general_plugins")}
    version, _ = installed_version()
    for change in lit_qrl_vllm_fast.CHANGES:
        if change.concerns(version, change.device or "cpu"):
            assert change.misfit() is None, change.name


@pytest.mark.vllm
def test_it_says_what_it_does():
    done = subprocess.run([sys.executable, "-m", "lit_qrl_vllm_fast"], capture_output=True, text=True, check=True)
    assert [f"{one.name} " in done.stdout for one in lit_qrl_vllm_fast.CHANGES].count(False) == 0
    assert "left out" not in done.stdout
