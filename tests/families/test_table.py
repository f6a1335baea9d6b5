"""Part of the table for every family, in this process; all of it is `slow`."""

import pytest

from tests.families.configs import FAMILIES, absent
from tests.families.page import DOCUMENT, document, kept
from tests.families.table import EXPORTS, FORMATS, measured, methods

CHECKED = ("fit/auto", "fit/fp8_row", "fit/int4_group", "lora/fp8_row", "qat/int4_group", "quantize/int4_group")
"""Formats of three kinds: plain, quantized activations, packed weights."""


def names(family):
    return family.model_type


def states(cells):
    return {name: getattr(one, "state", None) or one["state"] for name, one in cells.items()}


def test_the_installed_library_has_every_family():
    assert absent() == []


@pytest.mark.parametrize("family", FAMILIES, ids=names)
def test_a_family_works_or_is_refused(family):
    cells = dict(measured(family, "transformers", ("auto", "fp8_row", "int4_group"), CHECKED.__contains__))
    assert {name: one.text for name, one in cells.items() if one.state == "failed"} == {}
    assert all(one.early is not False for one in cells.values()), "a refusal came after the weights were loaded"
    told = states(kept(family).get("transformers", {}))
    found = states(cells)
    assert {name: found[name] for name in cells if name in told} == {n: told[n] for n in cells if n in told}
    for name, one in cells.items():
        if one.state == "works" and name.startswith("fit"):
            assert one.verified == 1.0
            assert (one.quantized or 0) == 0 if name == "fit/auto" else one.quantized > 0.5


ALL = [
    pytest.param(
        family,
        method,
        marks=[pytest.mark.slow, *[pytest.mark.vllm] * (family.kind == "state" and method == "command")],
        id=f"{family.model_type}-{method}",
    )
    for family in FAMILIES
    for method in dict.fromkeys(name.partition("/")[0] for name in (*methods("transformers", FORMATS), *EXPORTS))
]
"""Every cell of the embedded engine, a method at a time; the command of a family with a state needs vLLM."""


@pytest.mark.parametrize(("family", "method"), ALL)
def test_all_of_a_family_works_or_is_refused(family, method):
    cells = dict(measured(family, "transformers", wanted=lambda name: name.partition("/")[0] == method))
    assert {name: one.text for name, one in cells.items() if one.state == "failed"} == {}
    told = states(kept(family)["transformers"])
    assert states(cells) == {name: told[name] for name in told if name.partition("/")[0] == method}


def test_the_page_is_what_is_kept():
    assert DOCUMENT.read_text() == document()
