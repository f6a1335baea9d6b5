"""Runs one part of a benchmark in a process of its own, so that an engine's failure costs that part alone."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def measured(worker: list[str], timeout: float, after: list[str] | None = None) -> dict[str, Any]:
    """Return the figures that `--worker WORKER… FILE` of the running script writes, and `error` when it failed.

    Args:
        worker: what the script's `--worker` takes before the file.
        timeout: seconds after which the process and its children are killed; what was written by then counts.
        after: further arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, *sys.argv, "--worker", *worker, str(file), *(after or [])]
        start = time.perf_counter()
        process = subprocess.Popen(command, start_new_session=True)
        problem = ""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            problem = f"stopped after {timeout:.0f} s"
        figures = json.loads(file.read_text()) if file.exists() else {}
        if process.returncode and not problem and "error" not in figures:
            problem = f"exit status {process.returncode}"
        if problem:
            figures["error"] = problem
        figures["process_seconds"] = round(time.perf_counter() - start, 1)
        return figures


def weight_bytes(model: Any) -> int:
    """Return the memory of all parameters and buffers, each storage counted once."""
    sizes: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel():
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
