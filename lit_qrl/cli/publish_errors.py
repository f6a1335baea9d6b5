"""A publish that did not arrive as sent, as one paragraph."""

from pathlib import Path

from lit_qrl.errors import ConfigError, IncompleteError
from lit_qrl.formats.numerics import NONFINITE_REMEDY
from lit_qrl.receipts.ledger import PublishError, RefusedError
from lit_qrl.run.folder import last_checkpoint

SHOWN = 4
"""Faults that are written out."""
PROBE_REMEDY = (
    "Where learner and sampler may differ that much, set publisher.probe_every to 0; else choose another "
    "publisher.format or another engine."
)
ENGINE_REMEDY = (
    "If it happens once in a while, let publisher.on_fault: retry publish again; if it comes back, the engine does not "
    "hold what it is sent, and another one, or another version of it, has to be taken."
)
REMEDIES: dict[str, str] = {"non_finite": NONFINITE_REMEDY, "probe": PROBE_REMEDY}
"""Of faults that are all of one kind; of others it is the engine's."""
REFUSED_REMEDY = "What is sent are the policy's weights as the callbacks' on_publish leave them: check those."


def made_by_training(error: ConfigError, steps: int) -> bool:
    """Return True when weights were refused that `steps` optimizer steps, and not the checkpoint, made NaN or inf.

    >>> made_by_training(ConfigError("A weight holds NaN.", remedy=NONFINITE_REMEDY), steps=0)
    False
    """
    return error.remedy == NONFINITE_REMEDY and steps > 0


def paragraph(error: PublishError | ConfigError | IncompleteError, run_folder: str | Path) -> str:
    """Return what is wrong with a publish, where the run left its diary and its report, and what to do.

    Args:
        error: which ended the run; a `ConfigError` is of weights that are not finite.
        run_folder: of the run.

    >>> print(paragraph(RefusedError("The publish is incomplete: 1 of 9 tensors are missing.", 3), "runs/a/1"))
    ... # doctest: +ELLIPSIS
    The run was stopped by a publish that was refused. The publish is incomplete: 1 of 9 tensors are missing. ...
    """
    if isinstance(error, ConfigError):
        return f"The run was stopped. {error} {_where(run_folder, not_finite=True)}"
    if isinstance(error, (RefusedError, IncompleteError)):
        return f"The run was stopped by a publish that was refused. {error} {REFUSED_REMEDY} {_where(run_folder)}"
    which = f"publish {error.version}" if error.version >= 0 else "the publish before the first iteration"
    faults, kinds = [str(fault) for fault in error.faults], {fault.kind for fault in error.faults}
    more = f" (and {len(faults) - SHOWN} more)" if len(faults) > SHOWN else ""
    remedy = REMEDIES.get(next(iter(kinds)), ENGINE_REMEDY) if len(kinds) == 1 else ENGINE_REMEDY
    where = _where(run_folder, not_finite=kinds == {"non_finite"})
    return f"The run was stopped: {which} did not arrive as sent. {' '.join(faults[:SHOWN])}{more} {remedy} {where}"


def _where(run_folder: str | Path, not_finite: bool = False) -> str:
    report, saved = Path(run_folder) / "report" / "index.html", last_checkpoint(run_folder)
    diary = f"The report is {report}." if report.is_file() else f"The run folder is {run_folder}."
    doubt = ", and may hold these weights already" if not_finite else ""
    return f"{diary} The last checkpoint is {saved}{doubt}." if saved else f"{diary} No checkpoint had been written."
