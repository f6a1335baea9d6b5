import json

import pytest

from lit_qrl.cli.main import main
from lit_qrl.cli.models import models
from lit_qrl.errors import ConfigError
from tests.families.page import ENGINES, KEPT, METHODS

FAMILIES = {path.stem: json.loads(path.read_text()) for path in KEPT.glob("*.json")}


def printed(capsys, *families):
    main(["models", *families])
    return capsys.readouterr().out


def test_every_family_is_listed(capsys):
    lines = printed(capsys).splitlines()
    for row in FAMILIES.values():
        at = lines.index(row["name"])
        assert "TransformersEngine, fit: " in lines[at + 1]
    assert lines[lines.index("GPT-2") + 1].endswith("fit: auto, bf16; refused: fp8_row, fp8_tensor, int4_group, nvfp4")


@pytest.mark.parametrize("name", ["Falcon", "falcon", "gpt-oss", "gpt_oss", "Qwen3-MoE"])
def test_a_family_shows_its_cells_with_reasons(name, capsys):
    shown = " ".join(printed(capsys, name).split())
    row = FAMILIES[name.lower().replace("-", "_")]
    assert shown.startswith(row["name"])
    for engine, cells in row["engines"].items():
        for cell, one in cells.items():
            method, _, format = cell.partition("/")
            if method in METHODS and format:
                place = f"{ENGINES[engine].partition(',')[0]}, {METHODS[method]}: "
                line = shown.partition(place)[2].partition("Engine, ")[0]
                works, _, refused = line.partition("; refused: ")
                assert format in (works if one["state"] == "works" else refused), cell
                assert one["state"] == "works" or f"Refused {METHODS[method]}" in shown or METHODS[method] in shown


def test_an_unknown_family_is_one_paragraph():
    with pytest.raises(ConfigError, match=r"'Qwen 33' is no family that was measured\. Did you mean 'Qwen3'\?"):
        models("Qwen 33")
    with pytest.raises(ConfigError, match=r"Did you mean 'Qwen3-MoE'\?"):
        models("org/Qwen3-MoE-30B-A3B")
    with pytest.raises(ConfigError, match=r"Choose one of Llama 3, Llama 4\."):
        models("llama")
