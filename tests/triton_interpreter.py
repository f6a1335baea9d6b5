"""Runs a test's comparison in Triton's interpreter, in a process of its own: without a GPU, kernels are Python."""

import importlib
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

SCRIPT = """
import sys, torch
from tests import triton_interpreter

triton_interpreter.mend_conversions()
triton_interpreter.comparison(sys.argv)(torch.device("cpu"))
print("same")
"""


def mend_conversions():
    """Round as a device does: the interpreter cuts bf16 off, drops a carry of E4M3, and mistakes subnormals."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    exact = interpreter._convert_float
    kinds = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}

    def rounded(values, source, target, mode):
        if source == tl.bfloat16 and target == tl.float32:
            return values.astype(numpy.uint32) << 16
        if source != tl.float32 or target not in kinds:
            return exact(values, source, target, mode)
        kind, stored = kinds[target]
        return torch.from_numpy(values.view(numpy.float32).copy()).to(kind).view(stored).numpy()

    interpreter._convert_float = rounded


def comparison(argv):
    """Return the function that a script's arguments name, or the comparison of which it is the test."""
    found = getattr(importlib.import_module(argv[1]), argv[2])
    return getattr(found, "compare", found)


def run_interpreted(compare, script=SCRIPT):
    """Call `compare(device)`, a function of a test module, by a script that gets both names and prints "same" last."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 6):
        pytest.skip("its interpreter rounds 16-bit numbers otherwise than a device")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", script, compare.__module__, compare.__name__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("same\n"), done.stderr


def everywhere(compare=None, script=SCRIPT):
    """Make a test of a comparison on a device: in Triton's interpreter, and compiled on a GPU."""
    if compare is None:
        return partial(everywhere, script=script)
    marks = {"interpreted": pytest.mark.vllm, "compiled": pytest.mark.gpu}  # vLLM brings Triton

    @pytest.mark.parametrize("how", [pytest.param(how, marks=mark) for how, mark in marks.items()])
    def test(how):
        run_interpreted(compare, script) if how == "interpreted" else compare(torch.device("cuda"))

    test.__name__, test.__doc__, test.compare = compare.__name__, compare.__doc__, compare
    return test
