import math

import pytest
from markupsafe import escape

from lit_qrl.report import page

HOSTILE = "<script>alert('x')</script>&\"</pre></td>"
SECTIONS = [
    page.Section("plain", HOSTILE, caption=HOSTILE),
    page.Section("picture", "a", "picture.html", image=b"light", description=HOSTILE),
    page.Section("config", HOSTILE, "config.html", note=HOSTILE, text=HOSTILE),
    page.Section("layers", "b", "layers.html", note="c", rows=[(HOSTILE, HOSTILE, 1, HOSTILE)]),
]


def written(folder, **options):
    return page.write(folder, HOSTILE, HOSTILE, SECTIONS, **options).read_text()


def seen(html):
    return html.count(str(escape(HOSTILE)))


def test_text_is_escaped(tmp_path):
    html = written(tmp_path, tiles=[page.Tile(HOSTILE, HOSTILE, HOSTILE)], status=HOSTILE, footer=HOSTILE)
    assert html.count("<script") == 1  # the page's own
    assert "</pre></td>" not in html
    assert seen(html) == 18  # title 2, subtitle 1, navigation 2, tile 3, footer 1, sections 9


def test_a_closed_section_opens_at_a_click_and_an_open_one_does_not(tmp_path):
    html = written(tmp_path)
    assert html.count("<details>") == html.count("</details>") == 2
    assert html.count("<h2>") == 2
    assert html.count("<section") == 4


def test_a_status_is_coloured_only_if_it_is_known(tmp_path):
    assert '<span class="pill warn">interrupted</span>' in written(tmp_path, status="interrupted")
    assert "pill warn" not in written(tmp_path, status=HOSTILE)


@pytest.mark.parametrize(
    ("tile", "shown"),
    [(page.Tile("a", "x" * 15), "value"), (page.Tile("a", "x" * 16), "value long"),
     (page.Tile("a", "x" * 16, wide=True), "value")],
)  # fmt: skip
def test_a_long_value_is_smaller_unless_its_tile_is_wide(tmp_path, tile, shown):
    html = written(tmp_path, tiles=[tile])
    assert f'<div class="{shown}">{tile.value}</div>' in html
    assert ('<div class="tile wide">' in html) == tile.wide


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
    assert [page.duration(s) for s in (0.0, 0.0001, 0.0126, 0.9994, 0.9996)] == [
        "0.0 s",
        "< 1 ms",
        "13 ms",
        "999 ms",
        "1.0 s",
    ]
    assert page.duration(None) == page.duration(math.nan) == "–"


def test_a_page_is_replaced_as_a_whole(tmp_path):
    written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]


def test_means_with_their_error():
    assert page.mean_and_error([2.0, 4.0]) == "3.000 ± 1.000"  # sd √2, over √2
    assert page.mean_and_error([-1.0, None], signed=True) == "-1.000"
    assert page.mean_and_error([None]) == "–"


def test_a_page_carries_everything_with_it(tmp_path):
    html = written(tmp_path)
    assert "http" not in html
    assert "<link" not in html
    assert 'src="data:image/png;base64,bGlnaHQ="' in html
