import math

import pytest

from lit_qrl.report import page

HOSTILE = "<script>alert('x')</script>&\"</pre></td>"


@pytest.mark.parametrize(
    "html",
    [
        page.page(HOSTILE, ""),
        page.header(HOSTILE, HOSTILE, HOSTILE),
        page.navigation([("key", HOSTILE)]),
        page.tile(HOSTILE, HOSTILE, HOSTILE),
        page.card("key", HOSTILE, "", HOSTILE),
        page.folded("key", HOSTILE, HOSTILE, ""),
        page.picture(b"a", b"b", HOSTILE),
        page.table([HOSTILE], []),
        page.pill(HOSTILE),
        page.block(HOSTILE),
    ],
)
def test_text_is_escaped(html):
    assert "<script" not in html
    assert "</pre></td>" not in html


def test_numbers():
    assert page.number(0.0) == page.number(-0.0) == "0.000"
    assert page.number(-0.5) == "-0.500"
    assert page.number(0.0026, 4) == "0.0026"
    assert page.number(45.678) == "45.7"
    assert page.number(8473.4) == "8\u202f473"
    assert page.number(math.nan) == page.number(math.inf) == page.number(None) == "–"
    assert page.number(1e-7) == "1e-07"


def test_durations():
    assert page.duration(59.97) == "1 min 0 s"
    assert page.duration(3599.7) == "1 h 0 min"
    assert page.duration(None) == page.duration(math.nan) == "–"


def test_a_page_carries_everything_with_it():
    html = page.page("title", page.picture(b"light", b"dark", "plot"))
    assert "http" not in html
    assert "<link" not in html
    assert "src='data:image/png;base64,bGlnaHQ='" in html
    assert "prefers-color-scheme: dark" in html
