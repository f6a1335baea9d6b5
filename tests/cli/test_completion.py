import subprocess

import pytest

from lit_qrl.cli.main import COMMANDS, TRAINING
from lit_qrl.cli.training import completion
from lit_qrl.errors import ConfigError
from tests.command_line import status_of


@pytest.fixture(scope="module")
def script():
    return completion("bash", COMMANDS)


def completed(script, folder, *words):
    """Return what bash offers for the last word."""
    (folder / "lit-qrl.bash").write_text(script)
    line = " ".join(f"'{word}'" for word in words)
    ask = f'source ./lit-qrl.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE="{" ".join(words)}"; '
    ask += "COMP_POINT=${#COMP_LINE}; _shtab_lit_qrl 2>/dev/null; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "--norc", "-c", ask], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_and_their_options(script, tmp_path):
    assert set(completed(script, tmp_path, "lit-qrl", "")) >= {*TRAINING, *COMMANDS}
    assert completed(script, tmp_path, "lit-qrl", "fit", "--data.group") == ["--data.group_size"]
    assert completed(script, tmp_path, "lit-qrl", "validate", "--publisher.ev") == [
        "--publisher.every_n_iterations",
        "--publisher.evaluation_format",
    ]
    assert completed(script, tmp_path, "lit-qrl", "export", "--shard") == ["--shard_gib"]
    assert "--dry_run" in completed(script, tmp_path, "lit-qrl", "fit", "--dry")


def test_another_shell_is_refused(capsys):
    with pytest.raises(ConfigError, match=r"bash, zsh\. Given: fish"):
        completion("fish", {})
    assert status_of(["--print_shtab"]) == 2
    assert "Given: nothing" in capsys.readouterr().err
