from importlib.metadata import version

import torch
from packaging.specifiers import SpecifierSet

from lit_qrl.cli import versions as module
from lit_qrl.cli.main import main
from lit_qrl.rollout.vllm.installation import accepted
from lit_qrl.rollout.vllm.patches import PATCHES


def lines(capsys):
    main(["--versions"])
    return capsys.readouterr().out.splitlines()


def test_libraries_accepted_versions_and_every_patch_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(module, "installed_version", lambda: ((0, 32, 0), True))
    printed = lines(capsys)
    (transformers,) = (line.split() for line in printed if line.startswith("transformers "))
    assert transformers[1] == version("transformers")
    assert version("transformers") in SpecifierSet(transformers[2])
    assert "vllm                0.32.0 (CPU build)" in printed
    assert f"accepted            {accepted()}" in printed
    assert any(line.startswith("Plug-in lit-qrl-vllm-fast: ") for line in printed)
    for patch in PATCHES:
        (row,) = (i for i, line in enumerate(printed) if line[2:].startswith(f"{patch.name} "))
        assert str(patch.versions) in printed[row]
        assert printed[row].startswith("* ") == (
            patch.name not in ("rows_alone", "rotary_frequencies", "sleeping_memory", "marlin_workspaces")
        )
        assert printed[row + 1].startswith(f"    without it {patch.wrong[:60]}")


def test_without_vllm_the_patches_are_still_listed(monkeypatch, capsys):
    monkeypatch.setattr(module, "installed_version", lambda: None)
    printed = lines(capsys)
    assert "vllm                not installed" in printed
    assert not any(line.startswith("*") for line in printed)
    assert sum("    without it " in line for line in printed) == len(PATCHES)
