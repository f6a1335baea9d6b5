import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from lit_qrl.functional import _compile, importance
from tests.functional.helpers import Ranks

# Compiled in a process of its own: what the tests wrap around every function cannot be compiled through.
PROGRAM = """
import json, logging, sys, torch
from lit_qrl.functional import _compile, importance, mismatch
from benchmarks.corrections import CORRECTIONS, combine, mini_batch
import dataclasses, os

failures = []
_compile.log.addHandler(logging.StreamHandler(sys.stderr))
_compile.log.warning = lambda *args: failures.append(str(args))

def everything(context):
    parts = {name: one.correct(None, None, context) for name, one in CORRECTIONS.items()}
    three = [parts[name] for name in ("ais token", "geometric rejection", "token veto")]
    weights, keep, metrics = combine(three, context.mask)
    out = {f"{name} {key}": value for name, part in parts.items() for key, value in part.metrics.items()}
    out |= {f"{name} {key}": getattr(part, key) for name, part in parts.items() for key in ("weights", "keep")}
    out |= {f"combined {key}": value for key, value in {"weights": weights, "keep": keep, **metrics}.items()}
    for level in ("token", "sequence"):
        out[f"normalized {level}"] = importance.batch_normalized(parts["ais token"].weights, context.mask, level)
    out |= mismatch.mismatch_metrics(context.learner_old, context.sampler, context.mask)
    return {name: value for name, value in out.items() if value is not None}

compared = 0
with torch.no_grad():
    for shape in ((6, 40), (9, 77), (4, 130)):
        context = mini_batch(*shape, torch.device("cpu"))
        equal = dataclasses.replace(context, learner_old=context.sampler, log_ratio=0 * context.log_ratio)
        for given in (context, equal):
            os.environ["LIT_QRL_COMPILE"] = "0"
            wanted = everything(given)
            os.environ["LIT_QRL_COMPILE"] = "1"
            got = everything(given)
            assert got.keys() == wanted.keys()
            for name, value in wanted.items():
                torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-9, msg=lambda m: f"{name}: {m}")
                if given is equal and name.endswith("weights"):
                    assert bool((got[name] == 1).all()), name
                compared += 1
compiled = sum(one is not None for one in _compile._kernels.values())
print(json.dumps({"compared": compared, "compiled": compiled, "failures": failures}))
"""


@pytest.mark.slow
def test_compiled_statistics_equal_those_as_written():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=os.environ)
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["failures"] == []
    assert result["compiled"] >= 16
    assert result["compared"] > 300


@pytest.fixture
def double():
    calls = []

    @_compile.compiled
    def double(value, *, factor, all_reduce=_compile.no_all_reduce):
        calls.append(factor)
        return all_reduce(value * factor)

    double.calls = calls
    yield double
    for key in [key for key in _compile._kernels if key[0] is double.__wrapped__]:
        del _compile._kernels[key]


def pretend(monkeypatch, compile):
    monkeypatch.setenv(_compile.SWITCH, "1")
    monkeypatch.setattr(_compile, "_compile", compile)


def test_the_cpu_runs_as_written(double, monkeypatch):
    monkeypatch.delenv(_compile.SWITCH, raising=False)
    monkeypatch.setattr(_compile, "_compile", lambda function: pytest.fail("compiled"))
    assert double(torch.tensor(3.0), factor=2.0) == 6.0


def test_compiled_once_for_every_combination_of_constants(double, monkeypatch):
    made = []
    pretend(monkeypatch, lambda function: (made.append(function), function)[1])
    for factor in (2.0, 3.0, 2.0, 3.0):
        assert double(torch.tensor(3.0), factor=factor) == 3 * factor
    assert len(made) == 2


def test_arguments_may_be_given_by_name(double, monkeypatch):
    """However a call is written, the constants decide what is compiled, and the first tensor whether."""
    made = []
    pretend(monkeypatch, lambda function: (made.append(function), function)[1])
    assert double(value=torch.tensor(3.0), factor=2.0) == double(factor=2.0, value=torch.tensor(3.0)) == 6.0
    assert double(torch.tensor(3.0), factor=2.0) == 6.0
    assert len(made) == 1
    mask = torch.tensor([[True, True], [True, False]])
    weights = torch.tensor([[1.0, 3.0], [8.0, 9.0]])
    for level, mean in (("token", 4.0), ("sequence", 5.0)):
        by_name = importance.batch_normalized(weights=weights, mask=mask, level=level)
        assert torch.equal(by_name, importance.batch_normalized(weights, mask, level))
        assert by_name[mask].tolist() == pytest.approx([1 / mean, 3 / mean, 8 / mean])
    assert len(made) == 3


def test_a_wrong_call_is_the_callers_error(double):
    with pytest.raises(TypeError, match=r"double\(\) missing 1 required positional argument: 'value'"):
        double(factor=2.0)
    with pytest.raises(TypeError, match=r"double\(\) got an unexpected keyword argument 'scale'"):
        double(torch.tensor(3.0), scale=2.0)


def test_several_ranks_run_as_written(double, monkeypatch):
    pretend(monkeypatch, lambda function: pytest.fail("compiled"))
    for got in Ranks(2).run(lambda r, f: double(torch.tensor(3.0), factor=2.0, all_reduce=f)):
        assert got == 12.0


def test_what_cannot_be_compiled_runs_as_written_and_says_so_once(double, monkeypatch, caplog):
    def broken(*tensors, **constants):
        raise RuntimeError("no compiler\nmore")

    pretend(monkeypatch, lambda function: broken)
    with caplog.at_level(logging.WARNING, logger="lit_qrl.functional._compile"):
        assert [float(double(torch.tensor(3.0), factor=2.0)) for _ in range(3)] == [6.0] * 3
    assert len(caplog.records) == 1
    assert "RuntimeError: no compiler" in caplog.text
    assert "more" not in caplog.records[0].message.partition("no compiler")[2]


def test_errors_of_the_caller_stay_what_they_are(monkeypatch):
    @_compile.compiled
    def refuse(value, *, factor):
        raise ValueError(f"factor {factor}")

    pretend(monkeypatch, lambda function: function)
    for _ in range(2):
        with pytest.raises(ValueError, match="factor 2"):
            refuse(torch.tensor(1.0), factor=2)
