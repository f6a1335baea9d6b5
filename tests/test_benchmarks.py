"""What a benchmark says where it cannot measure: one sentence of its own, and nothing of other libraries."""

import importlib
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


@pytest.fixture
def endurance(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("endurance")


def test_endurance_reads_the_phase_from_the_stacks_of_all_threads(endurance):
    frame = '  File "/x/lit_qrl/{}", line 7 in {}\n'
    main = frame.format("rollout/embedded/decode.py", "run") + frame.format("loop/generation.py", "draw")
    assert endurance.phase_of(main) == "generation"
    writes = frame.format("run/saving.py", "_write")
    assert endurance.phase_of("Thread 0x1:\n" + writes + "Current thread 0x2:\n" + main) == "checkpoint writing"
    assert endurance.phase_of('  File "/usr/lib/python3.11/importlib/_bootstrap.py", line 1 in x\n') == "other"


def test_endurance_finds_one_bit(endurance, tmp_path):
    import torch

    for name, value in (("a", 1.0), ("b", 1.0 + 2**-23)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        weights = {"state_dict": {"w": torch.tensor([value, 2.0])}, "optimizer_states": [{"step": torch.tensor(3)}]}
        torch.save(weights, tmp_path / name / "checkpoints" / "last.ckpt")
        (tmp_path / name / "metrics.csv").write_text("epoch,time/update,reward/mean\n0,0.1,0.5\n")
    assert endurance.compare(tmp_path / "a", tmp_path / "a")["differing"] == []
    found = endurance.compare(tmp_path / "a", tmp_path / "b")
    assert (found["differing"], found["rows_differing"]) == (["state_dict.w"], 0)


def test_endurance_compares_memory_with_that_of_an_iteration(endurance):
    flat = dict.fromkeys(range(300), 1024 * 100)
    leak = {iteration: 1024 * (100 + iteration // 20) for iteration in range(300)}
    assert endurance.memory(flat, 100)["within"]
    assert not endurance.memory(leak, 100)["within"]


@pytest.mark.gpu
@pytest.mark.vllm
def test_an_engine_over_two_gpus_holds_what_was_sent_and_computes_with_it(tmp_path):
    import json

    import torch

    formats, out = ["bf16", "fp8_row", "int4_group"], tmp_path / "out.json"
    options = ["--tensor-parallel", "2", "--sections", "verify", "--start", "eager", "--timeout", "120"]
    command = [sys.executable, str(ROOT / "benchmarks" / "rollout.py"), *options, "--formats", *formats]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=400)
    if torch.cuda.device_count() < 2:
        assert "--tensor-parallel 2 needs as many GPUs, and there are 1." in done.stderr
        return
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["results"]
    assert [found[name]["faults"] for name in formats] == [[0, 0, 0, 0]] * len(formats)
