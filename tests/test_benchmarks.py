"""What a benchmark says where it cannot measure: one sentence of its own, and nothing of other libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step.py", "--iterations", "2"], "--iterations must be more than 2"),
        (["precision.py", "stack"], "every part needs a GPU"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(arguments, words):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / arguments[0]), *arguments[1:]]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Failed to load" not in ended.stderr + ended.stdout
