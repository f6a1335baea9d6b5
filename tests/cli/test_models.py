import json
import re

import pytest

from lit_qrl.cli.main import main
from lit_qrl.cli.models import ENGINES, MEASURED, METHODS, models
from lit_qrl.errors import ConfigError

TABLE = json.loads(MEASURED.read_text())
FAMILIES = {one["name"]: one for one in TABLE["families"]}


def printed(capsys, *families):
    main(["models", *families])
    return capsys.readouterr().out


def test_every_family_has_one_line(capsys):
    lines = printed(capsys).splitlines()
    for name in FAMILIES:
        (line,) = (line for line in lines if re.match(rf" ?{re.escape(name)}  ", line))
        assert line.split()
    assert any(re.search(r"Llama 3 +all +LoRA", line) for line in lines)
    assert any(re.search(r"GPT-2 +auto bf16 +LoRA", line) for line in lines)


@pytest.mark.parametrize("name", ["Falcon", "falcon", "gpt-oss", "gpt_oss", "Qwen3-MoE"])
def test_a_family_shows_its_cells_with_reasons(name, capsys):
    shown = printed(capsys, name)
    family = next(one for one in FAMILIES.values() if name.lower() in (one["name"].lower(), one["type"]))
    assert shown.startswith(f"{family['name']} ({family['type']})\n")
    assert family["command"] in shown
    for engine, cells in family["engines"].items():
        for cell in (*cells["works"], *cells["refused"]):
            method, _, format = cell.partition("/")
            row = rf"{ENGINES[engine]} +{METHODS[method]} .*(\n {{36,}}.*)*"  # long lists go on in the next line
            assert re.search(rf"{row}\b{format or 'all'}\b", shown), cell
        for cell, reason in cells["refused"].items():
            assert " ".join(TABLE["reasons"][reason].split()) in " ".join(shown.split()), cell


def test_an_unknown_family_is_one_paragraph():
    with pytest.raises(ConfigError, match=r"'Qwen 33' is no family that was measured\. Did you mean 'Qwen3'\?"):
        models("Qwen 33")
    with pytest.raises(ConfigError, match=r"Did you mean 'Qwen3-MoE'\?"):
        models("org/Qwen3-MoE-30B-A3B")


def test_every_reason_is_used_once():
    used = {i for one in FAMILIES.values() for cells in one["engines"].values() for i in cells["refused"].values()}
    assert used == set(range(len(TABLE["reasons"])))
    assert len(set(TABLE["reasons"])) == len(TABLE["reasons"])
