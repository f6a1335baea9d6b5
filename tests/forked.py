"""Runs programs in processes of their own that have their imports in common, which take seconds for each otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

SCRIPT = """
import gc, json, os, sys

shared, folder, *programs = sys.argv[1:]
exec(shared)
gc.freeze()  # what is shared is not looked through again at the end of each
codes = []
for number, program in enumerate(programs):
    child = os.fork()
    if child == 0:
        for name, stream in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(json.dumps(codes))
    sys.exit()
exec(program)  # at the top, so that it ends as a script does
"""


def run_each(shared: str, programs: list[str], folder: Path, seconds: float = 240, **environment: str) -> list:
    """Return how each Python program ended, one after the other; `shared` runs once, for all; the folder is empty."""
    command = [sys.executable, "-c", SCRIPT, shared, str(folder), *programs]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=seconds
    )

    def said(number, name):
        return (folder / f"{number}.{name}").read_text()

    codes = enumerate(json.loads(done.stdout))
    return [CompletedProcess((), code, said(number, "out"), said(number, "err")) for number, code in codes]
