import pytest

from lit_qrl.cli.parser import CommandParser
from lit_qrl.errors import ConfigError


def parser():
    made = CommandParser("audit", "Measure.", "examples:\n  lit-qrl audit --model m")
    made.add_argument("--model", required=True)
    made.add_argument("--samples", type=int, default=2)
    return made


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], r"^The following arguments are required: --model\. See lit-qrl audit --help\.$"),
        (["--modle", "m"], r"^--modle is not an option of lit-qrl audit\. Did you mean '--model'\?$"),
        (["--model=m", "--sample=3"], r"^--sample is not an option of lit-qrl audit\. Did you mean '--samples'\?$"),
        (["--model", "m", "--samples", "many"], r"^Argument --samples: invalid int value: 'many'\."),
    ],
)
def test_what_is_refused_is_one_paragraph(args, message):
    with pytest.raises(ConfigError, match=message):
        parser().parse_args(args)


def test_what_is_right_is_taken_and_help_has_the_examples(capsys):
    assert vars(parser().parse_args(["--model=m", "--samples", "-3"])) == {"model": "m", "samples": -3}
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(["--help"])
    assert stop.value.code == 0
    assert "lit-qrl audit --model m" in capsys.readouterr().out
