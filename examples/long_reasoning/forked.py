"""Runs of `lit-qrl fit` that begin in a second: forked from a process that has imported everything and seen no GPU."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

MODULES = ("lit_qrl.cli.main", "lit_qrl.cli.training", "transformers.models.qwen3.modeling_qwen3", "forked")
"""That a run imports, and what it is forked from has. This one is found beside the script that was started."""
ONE_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LIT_QRL_COMPILE": "0"}
TRY_SECONDS = 60.0
"""For the imports, and one number on a GPU."""

context = multiprocessing.get_context("forkserver")


class Forked:
    """A process with what `subprocess.Popen` has of it.

    Args:
        process: which has been started.
    """

    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    @property
    def returncode(self) -> int | None:
        """Its exit status, None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status when it has ended.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked run", timeout or 0.0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it."""
        self.process.kill()


def work(arguments: Sequence[str], log: str, folder: str, environment: dict[str, str]) -> None:
    """Be a run: its output goes to a file."""
    with open(log, "a", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.import_module("lit_qrl.cli.main").main(list(arguments))


def touch(gpu: str) -> None:
    """Compute something on a GPU, which fails in a process whose parent has."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    torch = importlib.import_module("torch")
    assert torch.ones(2, device="cuda" if gpu else "cpu").sum().item() == 2.0


def begin(arguments: Sequence[str], log: Path, folder: Path, gpu: str) -> Forked:
    """Start a run on a GPU, or on none."""
    environment = {**ONE_CORE, "CUDA_VISIBLE_DEVICES": gpu}
    process = context.Process(target=work, args=(tuple(arguments), str(log), str(folder), environment))
    process.start()
    return Forked(process)


def preload() -> None:
    """Start what runs are forked from, and wait for nothing."""
    os.environ.update({**ONE_CORE, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    context.set_forkserver_preload(list(MODULES))
    forkserver.ensure_running()


def ready(gpu: str) -> bool:
    """Return whether runs can be forked, which some library's look at the GPU would prevent."""
    preload()
    process = context.Process(target=touch, args=(gpu,))
    process.start()
    process.join(TRY_SECONDS)
    if process.exitcode is None:
        process.kill()
    if process.exitcode != 0:
        print("Runs cannot be forked here: each imports everything by itself.", file=sys.stderr, flush=True)
    return process.exitcode == 0
