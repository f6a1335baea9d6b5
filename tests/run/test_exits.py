"""However a command ends: its status and one sentence say so, and where a run had begun there is its report."""

import os
import re
import subprocess
from contextlib import ExitStack

import pytest
import torch

from lit_qrl.run.event_log import read_jsonl
from tests.forked import run_each
from tests.tiny_run import command, model_folder

SHARED = """
import errno, os, pathlib, signal, sys, threading, time
import lit_qrl.cli.training, lit_qrl.callbacks.report, lit_qrl.module, tests.tiny_run
import lit_qrl.cli.training as training
from lit_qrl.cli.main import main
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.module import GRPOModule
from lit_qrl.report import single
from lit_qrl.rollout import TransformersEngine
from lit_qrl.run import interrupt
from lit_qrl.run.checkpoint_files import CheckpointFiles
from tests.tiny_run import DigitReward

single.draw = single.draw_histograms = lambda *given: b"PNG"
interrupt.LET_GO, lit_qrl.callbacks.report.LAST_PAGE = 2.0, 120.0  # of a busy machine

def at(owner, name, do, call=1):
    original, calls = getattr(owner, name), []
    def wrapped(*given, **more):
        calls.append(1)
        if len(calls) == call:
            do()
        return original(*given, **more)
    setattr(owner, name, wrapped)

def term():
    os.kill(os.getpid(), signal.SIGTERM)

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)

def for_ever():
    threading.Timer(0.1, term).start()
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass

def full(name):
    opened = pathlib.Path.open
    class Full:
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *given): self.file.close()
        def write(self, *given): raise OSError(errno.ENOSPC, "No space left on device")
        def __getattr__(self, name): return getattr(self.file, name)
    def open(path, mode="r", *given, **more):
        file = opened(path, mode, *given, **more)
        return Full(file) if name in path.name and set(mode) & set("wa") else file
    pathlib.Path.open = open
"""
RUN_NOT_BEGUN = "fit was interrupted by {}, and no training was under way."
IN = "Interrupted by {} in iteration 2 of 2."
SIGNALS = {
    "imports": (
        "sys.modules.pop('lit_qrl.cli.training')\n"
        "seen = lambda name, *more: term() if 'training' in name else None\n"
        "sys.meta_path.insert(0, type('', (), {'find_spec': seen}))",
        RUN_NOT_BEGUN,
    ),
    "parsing": ("at(training, 'resolve_checkpoint', term)", RUN_NOT_BEGUN),
    "setup": ("at(RolloutDataModule, 'setup', ctrl_c)", "Interrupted by {} before the first iteration."),
    "engine": ("at(TransformersEngine, 'setup', term)", "Interrupted by {} in iteration 1 of 2."),
    "evaluation": ("at(lit_qrl.module, 'answer', term, 2)", "Interrupted by {} in iteration 1 of 2."),
    "publish": ("at(TransformersEngine, 'load_weights', term, 2)", IN),
    "generation": ("at(TransformersEngine, 'generate', ctrl_c, 2)", IN),
    "reward": ("at(DigitReward, '__call__', term, 2)", IN),
    "update": ("at(GRPOModule, 'training_step', term, 2)", "Interrupted by {}"),
    "checkpoint": ("at(CheckpointFiles, 'save', ctrl_c, 1)", "Interrupted by {}"),
    "report": ("at(lit_qrl.callbacks.report, 'render', ctrl_c)", "Interrupted by {} after the last of 2 iterations."),
    "end": ("at(training, 'let_go', term)", RUN_NOT_BEGUN),
}
"""Where a signal comes, and what is told."""
WITHOUT_REPORT = ("imports", "parsing", "setup")
STUCK = {
    "a loop that catches all": "at(DigitReward, '__call__', for_ever, 2)",
    "a thread at the end": (
        "threading.Thread(target=lambda: time.sleep(600)).start()\nat(TransformersEngine, 'generate', term, 2)"
    ),
}
LEAVES = {
    "a reward": ("at(DigitReward, '__call__', lambda: sys.exit(0), 2)", "SystemExit(0)"),
    "a callback": ("at(GRPOModule, 'on_train_epoch_end', lambda: sys.exit('done'))", "SystemExit('done')"),
    "its class": ("at(DigitReward, '__init__', sys.exit)\nDigitReward.__init__.__doc__ = ''", "SystemExit(None)"),
}
FULL = {"metrics.csv": "metrics", "samples.jsonl": "samples", "last.ckpt": "last.ckpt", "index.html": "index.html"}


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Return how each program ended, and its run folder."""
    folder, programs = tmp_path_factory.mktemp("exits"), {}
    programs |= {("signal", name): how for name, (how, _) in SIGNALS.items()}
    programs |= {("stuck", name): how for name, how in STUCK.items()}
    programs |= {("leaves", name): how for name, (how, _) in LEAVES.items()}
    programs |= {("full", name): f"full({part!r})" for name, part in FULL.items()}
    model, written, texts = model_folder(folder / "model"), folder / "written", []
    written.mkdir()
    for number, (key, how) in enumerate(programs.items()):
        (folder / str(number)).mkdir()
        words = ["--trainer.limit_val_batches", "1"] if key[1] == "evaluation" else []
        words += ["--checkpoint.every_n_iterations", "1"]
        texts.append(f"{how}\nsys.argv[1:] = {command(folder / str(number), model, *words)!r}\nmain()")
    found = run_each(SHARED, texts, written, seconds=900)
    return {key: (found[number], folder / str(number) / "run") for number, key in enumerate(programs)}


def told(end):
    """Return what a process said, as one line; no traceback is in it."""
    said = " ".join(f"{end.stdout} {end.stderr}".split())
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    return said


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_in_any_phase_gives_its_status_a_sentence_and_the_report(ended, name):
    end, run = ended["signal", name]
    how, expected = SIGNALS[name]
    number, status = ("SIGINT", 130) if "ctrl_c" in how else ("SIGTERM", 143)
    assert (end.returncode, expected.format(number) in told(end)) == (status, True), told(end)
    assert (run / "report" / "index.html").is_file() == (name not in WITHOUT_REPORT)


@pytest.mark.parametrize("name", STUCK)
def test_code_that_does_not_let_go_is_ended_with_the_signal_s_status_and_the_report(ended, name):
    end, run = ended["stuck", name]
    assert end.returncode == 143
    assert "SIGTERM was not let through for 2 s at " in told(end)
    if "loop" in name:
        assert "(for_ever)" in told(end)
        assert read_jsonl(run / "events.jsonl")[-1]["kind"] == "interrupt"
    assert (run / "report" / "index.html").is_file()


@pytest.mark.parametrize("name", LEAVES)
def test_code_that_ends_the_process_ends_the_run_with_status_70_and_its_place(ended, name):
    end, _ = ended["leaves", name]
    assert (end.returncode, f"The run was ended by {LEAVES[name][1]} at " in told(end)) == (70, True), told(end)


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_is_one_sentence_that_names_file_and_disk(ended, name):
    end, _ = ended["full", name]
    said = told(end)
    assert end.returncode == 70, said
    why = r"could not be written: No space left on device \(/\S* has [\d.,]+ MiB free\)\. Free some space\."
    assert len(re.findall(rf"{re.escape(name)} {why}", said)) == 1, said


PLACES = {"a row": "on_train_batch_end", "a checkpoint": "on_train_epoch_end", "the report": "on_fit_end"}


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return an unbroken run, and of each disk of 64 MiB, full from a moment on: where it is, and both its runs."""
    folder, programs, options = tmp_path_factory.mktemp("full"), [], ["--checkpoint.every_n_iterations", "1"]
    model, written = model_folder(folder / "model"), folder / "written"
    written.mkdir()

    def program(run, before="", *more):
        run.mkdir(exist_ok=True)
        programs.append(f"{before}sys.argv[1:] = {command(run, model, *options, *more, epochs=3)!r}\nmain()")

    program(folder / "unbroken")
    with ExitStack() as mounts:
        for place, moment in PLACES.items():
            disk = folder / place.replace(" ", "_")
            ballast = disk / "ballast"
            disk.mkdir()
            words = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
            if os.geteuid() or subprocess.run(words, capture_output=True, check=False).returncode:
                pytest.skip("no file system can be mounted here")
            mounts.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
            fills = (
                "import shutil\ndef fill():\n"
                f"    with open({str(ballast)!r}, 'wb', buffering=0) as file:\n"
                "        try:\n            while file.write(bytes(4096)): pass\n        except OSError: pass\n"
                f"at(GRPOModule, {moment!r}, fill, {1 if place == 'the report' else 2})\n"
            )
            program(disk, fills)
            program(disk, f"os.unlink({str(ballast)!r})\n", "--resume_if_possible", "true")
        whole, *ends = run_each(SHARED, programs, written, seconds=900)
        assert whole.returncode == 0, told(whole)
        disks = (folder / place.replace(" ", "_") for place in PLACES)
        yield folder / "unbroken", dict(zip(PLACES, zip(disks, ends[::2], ends[1::2], strict=True), strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_a_full_disk_ended_goes_on_with_the_same_bits(filled, place):
    """The disk is full from a moment of the second iteration on."""
    unbroken, (disk, full, again) = filled[0], filled[1][place]
    assert (full.returncode, again.returncode) == (70, 0), told(full)
    assert re.search(rf"{disk}/run/\S+ could not be written: No space left on device \({disk} has", told(full))
    assert "Traceback" not in told(again)
    one, other = (folder / "run" / "checkpoints" / "last.ckpt" for folder in (unbroken, disk))
    first, second = (torch.load(path, weights_only=True)["state_dict"] for path in (one, other))
    assert all(torch.equal(first[key], second[key]) for key in first)
    rows = [(folder / "run" / "metrics.csv").read_text().splitlines() for folder in (unbroken, disk)]
    assert len(rows[0]) == len(rows[1])
