"""The pages in docs/ name what the code has."""

import importlib
import re
from inspect import signature
from pathlib import Path

import pytest

from lit_qrl import callbacks, objective
from lit_qrl.functional.mismatch import mismatch_metrics
from lit_qrl.functional.objective import clipped_surrogate
from lit_qrl.loop.combine import combine
from lit_qrl.loop.hooks import RLCallback
from tests.callbacks.corrections import context

DOCS = Path(__file__).parents[1] / "docs"
CORRECTIONS = [
    callbacks.AIS(),
    callbacks.AIS(level="sequence"),
    callbacks.TruncatedIS("sequence", upper="auto"),
    callbacks.TruncatedIS(upper=float("inf")),
    callbacks.MaskedIS(),
    callbacks.MaskedIS("sequence"),
    *(
        callbacks.RatioRejection(2.0, None, k, over)
        for k in ("k1", "k2", "k3")
        for over in ("token", "mean", "sum", "max")
    ),
    callbacks.GeometricRejection(),
    callbacks.TokenVeto(),
    callbacks.OffPolicySequenceMask(0.1),
]


def documented(section):
    """Return the metric names in the first column of the tables of a section, with `…_x` spelled out."""
    text = (DOCS / "metrics.md").read_text().split(f"## `{section}/*`")[1].split("\n## ")[0]
    names = set()
    for row in re.findall(r"^\| (`[^|]*) \|", text, flags=re.MULTILINE):
        found = re.findall(r"`([^`]+)`", row)
        for name in found:
            names.add(name.replace("…", found[0].split("_low")[0].split("_high")[0]))
    return names


def test_every_mismatch_metric_is_documented_and_no_other():
    given = context()
    assert documented("mismatch") == set(mismatch_metrics(given.learner_old, given.sampler, given.mask))


def test_every_correction_metric_is_documented_and_no_other():
    given, names = context(), set()
    for callback in CORRECTIONS:
        correction = callback.correct(None, None, given)
        names |= combine([correction], given.mask)[2].keys()
    assert documented("correction") == {name.removeprefix("correction/") for name in names}


def test_every_update_metric_of_the_objectives_is_documented():
    given = context()
    names = clipped_surrogate(given.learner_old, given.sampler, given.advantages, given.mask).metrics
    assert documented("update") >= {name.removeprefix("update/") for name in names} | {"reference_kl"}


def test_every_correction_and_objective_has_its_place_among_the_estimators():
    text = (DOCS / "estimators.md").read_text()
    classes = {type(callback) for callback in CORRECTIONS}
    kinds = [value for value in vars(objective).values() if isinstance(value, type)]
    classes |= {kind for kind in kinds if issubclass(kind, objective.Objective) and not kind.__name__.startswith("_")}
    assert len(classes) >= 6 + 10
    for kind in classes:
        assert f"`{kind.__name__}" in text or f"`lit_qrl.objective.{kind.__name__}" in text, kind
    assert RLCallback.__name__ in text


def elsewhere():
    """Return (function, class) of every row of the table of other libraries' names."""
    text = (DOCS / "functional.md").read_text().split("## What it is called elsewhere")[1]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| ")][2:]
    return [(row[2].strip(" `"), row[3].strip(" `")) for row in rows]


def parts(call):
    name, _, arguments = call.rstrip(")").partition("(")
    return name, [one for one in arguments.split(", ") if one]


@pytest.mark.parametrize(("function", "cls"), elsewhere())
def test_what_other_libraries_options_are_called_here_exists(function, cls):
    if function != "none":
        path, arguments = parts(function)
        module, name = path.split(".")
        found = getattr(importlib.import_module(f"lit_qrl.functional.{module}"), name)
        assert set(arguments) <= set(signature(found).parameters), function
    name, arguments = parts(cls)
    kind = getattr(callbacks, name, None) or getattr(objective, name)
    known = {one for base in kind.__mro__ for one in signature(base.__init__).parameters}
    assert set(arguments) <= known, cls


def test_every_module_of_the_library_has_its_row():
    rows = set(
        re.findall(r"^\| `(\w+)` \|", (DOCS / "functional.md").read_text().split("## What it is")[0], re.MULTILINE)
    )
    folder = DOCS.parent / "lit_qrl" / "functional"
    assert rows | {"diagnostics"} == {path.stem for path in folder.glob("[!_]*.py")}
    assert len(elsewhere()) > 20
