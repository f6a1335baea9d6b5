from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from lit_qrl.cli.parser import CommandParser, run
from lit_qrl.errors import ConfigError


def measure(
    folders: Sequence[Path],
    *,
    model: str,
    kinds: Sequence[str] = ("a", "b"),
    names: Sequence[str] = (),
    samples: int = 2,
    rate: float = 0.5,
    dtype: Literal["bf16", "fp16"] = "bf16",
    chat: bool = True,
    subset: str | None = None,
    group_size: int | None = None,
):
    """Measure.

    Examples:
      lit-qrl measure here --model m

    Args:
        folders: where to measure.
        model: a folder.
        kinds: of model.
        names: of layers.
        samples: how many.
        rate: of what.
        dtype: of weights.
        chat: whether to chat.
        subset: of the data.
        group_size: of weights (default: 128).
    """
    given = dict(locals())
    return {name: value for name, value in given.items() if value != DEFAULTS.get(name)}


DEFAULTS = {"kinds": ["a", "b"], "names": [], "samples": 2, "rate": 0.5, "dtype": "bf16", "chat": True}
DEFAULTS |= {"subset": None, "group_size": None}
GIVEN = {"folders": [Path("f")], "model": "m"}


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("", {}),
        ("g", {"folders": [Path("f"), Path("g")]}),
        ("--samples -3 --rate=1e-5 --group_size 4", {"samples": -3, "rate": 1e-5, "group_size": 4}),
        ("--kinds x y --names *.up [a]*.down", {"kinds": ["x", "y"], "names": ["*.up", "[a]*.down"]}),
        ("--names --subset 1.50", {"subset": "1.50"}),
        ("--names x --samples 3 --names y z --names=w", {"names": ["x", "y", "z", "w"], "samples": 3}),
        ("--dtype fp16 --chat false", {"dtype": "fp16", "chat": False}),
        ("--chat=0", {"chat": False}),
        ("--chat NO", {"chat": False}),
    ],
)
def test_what_is_right_is_taken_as_the_signature_says(words, more):
    assert run(measure, ["f", *words.split(), "--model", "m"]) == {**GIVEN, **more}


@pytest.mark.parametrize(
    "words", ["--chat f --model m", "--model m --chat f", "f --chat --model m", "f --model m --chat 1"]
)
def test_a_bool_without_a_value_is_true_and_takes_no_folder(words):
    assert run(measure, words.split()) == GIVEN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"^The following arguments are required: FOLDER, --model\. See lit-qrl measure --help\.$"),
        ("f --modle m", r"^--modle is not an option of lit-qrl measure\. Did you mean '--model'\?$"),
        ("f --model=m --sample=3", r"^--sample is not an option of lit-qrl measure\. Did you mean '--samples'\?$"),
        ("f --model m --samples many", r"^--samples: the value has the wrong type\. Expected: int\. Given: many\. See"),
        ("f --model m --dtype fp61", r"^--dtype: .* Expected: bf16, fp16\. Given: fp61\. Did you mean 'fp16'\?"),
        ("f --model m --chat=maybe", r"^--chat: .* Expected: true or false\. Given: maybe\."),
        ("f --model", r"^Argument --model: expected one argument\. See lit-qrl measure --help\.$"),
        ("f --model m --kinds", r"^Argument --kinds: expected at least one argument\."),
        ("f --model m -z", r"^-z is not an option of this command\."),
    ],
)
def test_what_is_refused_is_one_paragraph(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(measure, words.split())
    assert "\n" not in str(caught.value)


def test_the_help_is_the_signature_and_the_docstring(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as stop:
        CommandParser(measure).parse_args(["--help"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("usage: lit-qrl measure --model MODEL [--kinds KIND [KIND ...]] [--names [NAME ...]]")
    assert {" ".join(line.split()) for line in lines} >= {
        "Measure.",
        "FOLDER where to measure",
        "--model MODEL a folder (required)",
        "--kinds KIND [KIND ...]",
        "of model (default: a b)",
        "--samples N how many (default: 2)",
        "--rate RATE of what (default: 0.5)",
        "--dtype {bf16,fp16} of weights (default: bf16)",
        "--chat [{true,false}]",
        "whether to chat (default: true)",
        "--subset SUBSET of the data",
        "--group_size N of weights (default: 128)",
    }
    assert lines[-2:] == ["Examples:", "  lit-qrl measure here --model m"]
