"""What a benchmark says where it cannot measure: one sentence of its own, and nothing of other libraries."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    iteration = importlib.import_module("iteration")


def test_iterations_count_from_the_third_on_and_of_a_run_that_was_cut_those_that_there_are():
    rows = [{"time/iteration": seconds, "time/update": seconds / 2} for seconds in (30.0, 9.0, 4.0, 6.0, 5.0)]
    found = iteration.figures(rows, [9.5, 4.5, 6.5, 5.5])
    assert (found["counted"], found["wall"], found["row_iteration"], found["update"]) == (3, 5.5, 5.0, 2.5)
    assert iteration.figures(rows[:2], [9.5])["wall"] == 9.5


def test_the_rate_of_an_update_is_of_what_a_token_is_multiplied_with():
    from types import SimpleNamespace

    args, case = SimpleNamespace(prompt=200, tiny=False, devices=1), iteration.CASES["full-1.5b"]
    rows = [{"time/update": 2.0, "rollout/length": 512.0}] * 3
    found = iteration.rates(case, args, rows)
    assert found["tokens"] == 16 * (200 + 8 * 512)
    layer = 2 * 1536**2 + 2 * 1536 * 256 + 3 * 1536 * 8960
    operations = 6 * (28 * layer + 151936 * 1536) * found["tokens"]
    assert found["update_rate"] == round(operations / 2.0 / 989e12, 3)
    assert "score_rate" not in found
    assert iteration.rates({**case, "lora": {}}, args, rows)["update_rate"] == round(operations / 3 / 989e12, 3)


def test_runs_of_both_orders_are_compared_together():
    ours = {"peer": "here", "arm": "bf16", "peak_gib": 50.0, "counted": 2, "masters": "bf16"}
    theirs = {**ours, "peer": "trl", "peak_gib": 60.0}
    runs = [{**ours, "walls": [9, 2, 4]}, {**theirs, "walls": [30, 9, 9]}, {**theirs, "walls": [6, 6]}]
    runs += [{**ours, "walls": [3, 3], "peak_gib": 52.0}]
    runs += [{**ours, "masters": "fp32", "walls": [5, 5]}]  # beside nothing
    runs += [{**theirs, "walls": [5, 5], "recompute": "none"}]  # not its default
    (line,) = iteration.compared(runs)
    found = "TRL 7.50 s, here bf16 3.00 s: 2.500 times as fast; peaks 60.0 and 52.0 GiB"
    assert line == f"bf16 masters: {found}"


def test_a_run_ends_with_the_process_that_watches_it_and_its_rows_count(tmp_path, monkeypatch):
    metrics = tmp_path / "metrics.csv"
    metrics.write_text("time/iteration\n1.0\n2.0\n")
    monkeypatch.setattr(iteration, "read_rows", lambda path: iteration.ENDED.append(15) or [{}, {}])
    run = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ends, peaks = iteration.watch(run, metrics, deadline=float("inf"), wanted=7)
    finally:
        iteration.ENDED.clear()
        run.kill()
    assert (len(ends), len(peaks), run.returncode) == (2, 3, -9)


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
