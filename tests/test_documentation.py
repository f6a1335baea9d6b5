"""The pages in docs/ name what the code has."""

import importlib.util
import re
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lit_qrl import __version__, callbacks, objective
from lit_qrl.functional.diagnostics import QUADRANTS
from lit_qrl.functional.mismatch import mismatch_metrics
from lit_qrl.functional.objective import clipped_surrogate
from lit_qrl.loop.correction import combine
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.routing import load_balance, record_difference
from lit_qrl.loop.state import IterationMetrics
from lit_qrl.types import no_all_reduce
from tests.callbacks.corrections import context

DOCS = Path(__file__).parents[1] / "docs"
CORRECTIONS = [
    callbacks.AIS(oracle=True),
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
    others = {f"{name}_turn_<i>" for name in ("abs_log_ratio", "kl_k3")} | {f"share_{name}" for name in QUADRANTS}
    assert documented("mismatch") == {*mismatch_metrics(given.learner_old, given.sampler, given.mask), *others}


def test_every_correction_metric_is_documented_and_no_other():
    given, names = context(), set()
    for callback in CORRECTIONS:
        correction = callback.correct(None, None, given)
        names |= combine([correction], given.mask)[2].keys()
    assert documented("correction") == {name.removeprefix("correction/") for name in names}


def test_every_routing_metric_is_documented():
    metrics, routes = IterationMetrics(), torch.zeros(1, 2, 1, 2, dtype=torch.uint8)
    for prefix in ("", "free_"):
        record_difference(metrics, routes, routes, prefix)
    names = {name.removeprefix("routing/").replace("layer_0", "layer_<i>") for name in metrics.compute(no_all_reduce)}
    known = documented("routing")
    assert (
        names
        | load_balance(routes, 4).keys()
        | {"free_kl_k3", "replayed_kl_k3", "megabytes", "balance_loss", "shared_prompt_tokens"}
        == known - {"shift", "shift_floored"}  # of an update: tests/callbacks/test_router_shift.py
    )


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


def script(name):
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def column(page, header, rows):
    """Return the cells of 1.5B of a page's table that begins so."""
    lines = (DOCS / page).read_text().splitlines()
    head = next(line for line in lines if line.startswith(header))
    place = [cell.strip() for cell in head.split("|")].index("1.5B")
    return [line.split("|")[place].strip() for line in lines if re.match(rows, line)]


def test_the_tables_of_sizes_and_layouts_are_what_the_script_computes():
    sizing = script("sizing")
    sizes = [f"{sum(sizing.parts('1.5B', row).values()):.1f}" for row in sizing.ROWS]
    assert column("one_gpu.md", "| trained | sampler", r"\| (full|LoRA)") == sizes
    layouts = [line.split("|")[5].strip() for line in sizing.layouts(("1.5B",))]
    assert column("scale.md", "| strategy | trained", r"\| `\w+` \| (full|LoRA)") == layouts[2:]


@pytest.mark.slow
def test_the_whole_sizing_page_is_what_the_script_computes():
    sizing, page = script("sizing"), (DOCS / "one_gpu.md").read_text()
    for line in (*sizing.lines(), *sizing.comparison()):
        assert line in page
    assert "\n".join(sizing.layouts()) in (DOCS / "scale.md").read_text()


def test_the_tables_of_the_cost_are_what_the_script_computes():
    page, cost = (DOCS / "studies" / "scale.md").read_text(), script("cost")
    assert "\n".join(cost.moved_lines()) in page
    assert "\n".join(cost.bound_lines()) in page


def test_the_costs_add_up():
    """Against sums by hand: 8B on 2 GPUs half of the model comes from the other; 70B is bound as the page says."""
    cost = script("cost")
    model = cost.Model(8e9, 32, 131072)
    assert cost.moved(model, 2) == (16e9, 16e9, 8e9, 16e9)
    assert cost.moved(model, 1) == (0, 0, 0, 0)
    assert cost.needed(model, 2, 8) == pytest.approx(64e9 + 2 * 2 * 2 * 8e9 / 32 + 8e9)
    load = cost.Load(sequences=4, prompt=0, completion=100, rows=2)
    machine = cost.Machine(matmul=1e12, utilisation=0.5, memory=1e9, streaming=1.0, link=1e9, hop=0.0)
    found = cost.cost(model, 2, load, 8, machine)
    assert found.compute == pytest.approx(10 * 8e9 * 200 / 0.5e12)
    assert found.travel == pytest.approx(40.0)
    assert found.rollout == pytest.approx(100 * (8e9 + 2 * 50 * 131072) / 1e9)
    assert found.publish == pytest.approx(16 + 40)
    assert found.bound == "the GPU's memory (decoding)"
    assert found.iteration == pytest.approx(max(found.compute, 40) + found.rollout + 56)
    crowded = load._replace(sequences=64, completion=10000)  # 42 GB of keys and values
    small = machine._replace(capacity=100e9)  # of which 16 GB are free
    waves = cost.cost(model, 2, crowded, 8, small).rollout / 10000 * 1e9 - 32 * 5000 * 131072
    assert waves == pytest.approx(3 * 8e9)


def test_measured_peaks_of_the_sizing_page_are_those_of_the_study():
    sizing = script("sizing")
    qerl = (DOCS / "studies" / "qerl.md").read_text()
    peaks = re.search(r"Memory of the whole process.*?\n\n(.*?)\n\n", qerl, re.DOTALL)[1]
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in peaks.splitlines()[2:])}
    for shape, row, measured in sizing.MEASURED:
        if row.trained.endswith("shared"):
            assert f"{measured}" in qerl.split("### The same over one base")[1].split("###")[0]
        else:
            assert float(rows[shape][5 - ("bf16" in row.trained)]) == measured


def test_messages_of_the_page_on_symptoms_are_those_of_the_code():
    joined = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in (DOCS.parent / "lit_qrl").rglob("*.py")))
    quoted = re.findall(r"“([^”]+)”", (DOCS / "troubleshooting.md").read_text())
    assert len(quoted) > 25
    for message in quoted:
        for part in message.split("…"):
            assert part.strip() in joined, message


def test_metrics_of_the_page_on_symptoms_exist():
    known = (DOCS / "metrics.md").read_text() + "".join(
        f"`time/{name}`" for name in ("iteration", "rollout", "reward", "score", "update", "checkpoint")
    )
    for section in ("mismatch", "correction", "update"):
        known += "".join(f"`{section}/{name}`" for name in documented(section))
    pages = "".join((DOCS / page).read_text() for page in ("troubleshooting.md", "choosing.md"))
    named = set(re.findall(r"`((?:mismatch|correction|update|rollout|guard|time|publish|val)/\w+)`", pages))
    assert len(named) > 15
    assert {name for name in named if f"`{name}`" not in known} == set()


def test_the_reference_has_every_room():
    rooms = script("reference").rooms()
    folder = DOCS.parent / "lit_qrl"
    public = {
        path.stem for path in folder.iterdir() if not path.name.startswith("_") and path.stem not in ("aliases", "py")
    }
    assert set(rooms) == public
    assert "lit_qrl.rewards.math.reward" in rooms["rewards"]


def test_doctests_and_tables_of_docstrings_are_fenced(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    fenced = script("docstrings").fenced
    assert fenced("Sum.\n>>> [1][0]\n1\n\nMore.") == "Sum.\n\n```python\n>>> [1][0]\n1\n```\n\nMore."
    assert fenced("==== ==\na    b\n==== ==") == "```text\n==== ==\na    b\n==== ==\n```"


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= set(cited)
    assert cited["version"] == __version__
