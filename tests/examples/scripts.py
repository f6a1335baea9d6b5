"""What tests of examples share: their modules for as long as a test takes, and the folder that a run leaves."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lit_qrl.run.event_log import log_event
from lit_qrl.run.loggers import RunCSVLogger

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def size(folder):
    """Return the bytes of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_shipped(folder, network, layers, largest, outputs=128):
    """Check that a shipped model is small, and its linear layers of sizes that kernels and groups of 128 take."""
    assert size(folder) < largest
    linears = [m for name, m in network.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    assert len(linears) == layers
    assert all(one.in_features % 128 == 0 and one.out_features % outputs == 0 for one in linears)


def check_repeats(script, arguments, folder, status=0):
    """Check that a command that makes a model makes it bit for bit again; the first is in `folder / "one"`."""
    weights = []
    for name in ("one", "two"):
        assert script.main([*arguments, "--output", str(folder / name)]) == status
        weights.append(AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@contextmanager
def importing(*folders):
    """Give what imports a module out of folders of examples; their names, such as `run`, are those of others too."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(EXAMPLES / folder) for folder in folders]
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
                del sys.modules[name]


def write_run(job, record, rows, ending="finish"):
    """Write the folder that a run of `job` would leave; each row is one of metrics, by its epoch."""
    job.folder.mkdir(parents=True)
    record(job)
    log_event(job.folder, "start", "Training started.", iteration=0)
    logger = RunCSVLogger(job.folder)
    for row in rows:
        logger.log_metrics(row, step=row["epoch"])
    if ending:
        log_event(job.folder, ending, "Training ended.", iteration=len(rows))
