import subprocess
import sys
from pathlib import Path

from lit_qrl.cli.main import overview


def test_the_package_runs_as_the_command():
    command = [sys.executable, "-m", "lit_qrl.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == f"{overview()}\n"
