import json
from html.parser import HTMLParser

import pytest

from lit_qrl.report import page as pages
from lit_qrl.report.run import Run

HOSTILE = "</pre><script>alert(1)</script>\"'&amp;<img src=x onerror=alert(2)>"


class Samples(HTMLParser):
    """What a browser would see of the samples: by sample its completion's text, its coloured and its framed parts."""

    def __init__(self, html):
        super().__init__()
        self.samples, self.tags, self._within, self._pre = [], [], [], 0
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "article":
            self.samples.append({"reward": attrs["data-reward"], "texts": [], "coloured": [], "said": []})
        elif tag == "pre" and self.samples:
            self.samples[-1]["texts"].append("")
        if tag in ("pre", "i", "span"):
            self._within.append((tag, attrs))

    def handle_endtag(self, tag):
        if tag in ("pre", "i", "span"):
            assert self._within.pop()[0] == tag

    def handle_data(self, data):
        if not self.samples or not any(tag == "pre" for tag, _ in self._within):
            return
        self.samples[-1]["texts"][-1] += data
        tag, attrs = self._within[-1]
        if tag == "i":
            self.samples[-1]["coloured"].append((data, attrs["class"], attrs["title"]))
        elif attrs.get("class") == "said":
            self.samples[-1]["said"].append(data)


def page_of(folder, samples):
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    section = pages.samples_section(Run(folder))
    assert isinstance(section, pages.Section)
    return pages.write(folder, "t", "s", [section]).read_text()


def test_tokens_are_coloured_by_their_log_ratio_and_turns_are_told_apart(tmp_path):
    sample = {
        "iteration": 3, "version": 2, "prompt": "p", "completion": "one<b>two end", "answer": "42", "reward": -0.5,
        "token_lengths": [3, 3, 3, 4], "log_ratio": [0.02, None, -0.7, 0.0199], "environment": [[1, 2]],
    }  # fmt: skip
    html = page_of(tmp_path, [sample])
    (found,) = Samples(html).samples
    assert found["texts"] == ["p", "one<b>two end", "42"]
    assert found["coloured"] == [("one", "d1", "+0.020"), ("two", "d-3", "-0.700")]
    assert found["said"] == ["<b>"]
    assert found["reward"] == "-0.5"
    assert html.count('class="legend"') == 2


def test_hostile_text_stays_text_in_every_place(tmp_path):
    n = len(HOSTILE)
    sample = {
        "iteration": HOSTILE, "version": HOSTILE, "prompt": HOSTILE, "completion": 3 * HOSTILE, "answer": HOSTILE,
        "reward": 1.0, "parts": {HOSTILE: HOSTILE, "b": 1}, "token_lengths": [n, n, n], "log_ratio": [0.9, None, 0.0],
        "environment": [[1, 2]],
    }  # fmt: skip
    html = page_of(tmp_path, [sample])
    page = Samples(html)
    (found,) = page.samples
    assert found["texts"] == [HOSTILE, 3 * HOSTILE, HOSTILE]
    assert found["coloured"] == [(HOSTILE, "d3", "+0.900")]
    assert found["said"] == [HOSTILE]
    assert [tag for tag, _ in page.tags].count("script") == 1  # the page's own
    assert not any(tag == "img" or any(name.startswith("on") for name in attrs) for tag, attrs in page.tags)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"token_lengths": [1, 1], "log_ratio": [0.5]},
        {"token_lengths": [99, 99], "log_ratio": [0.5, 0.5]},
        {"token_lengths": "text", "log_ratio": 3, "environment": [[1], "x", [0, 10**9]]},
        {"token_lengths": [-5, None, 2], "log_ratio": ["inf", None, None], "environment": [[-3, 1]]},
        {"reward": None, "parts": 3, "correct": "yes", "answer": {"a": [1]}},
    ],
)
def test_odd_records_lose_no_text(tmp_path, extra):
    (found,) = Samples(page_of(tmp_path, [{"completion": "abcdef", **extra}])).samples
    assert found["texts"][1] == "abcdef"


def test_every_iteration_is_there_while_it_fits_and_the_last_is_open(tmp_path):
    samples = [{"iteration": i, "prompt": "p", "completion": f"c{i}"} for i in range(1, 8)]
    page = Samples(page_of(tmp_path, samples))
    groups = [attrs for tag, attrs in page.tags if tag == "details"]
    assert [one["data-iteration"] for one in groups] == [str(i) for i in range(1, 8)]
    assert ["open" in one for one in groups] == [False] * 6 + [True]


def test_a_long_run_keeps_its_page_small_and_says_so(tmp_path):
    """A thousand iterations of 4 completions with 2000 tokens each, every one coloured."""
    long = {"prompt": "p" * 400, "completion": "abc " * 2000, "token_lengths": [4] * 2000, "log_ratio": [0.3] * 2000}
    samples = [{"iteration": 1 + i // 4, **long} for i in range(400)]
    html = page_of(tmp_path, samples)
    assert len(html) < 3 * pages.PAGE_CHARACTERS
    iterations = [int(a["data-iteration"]) for tag, a in Samples(html).tags if tag == "details"]
    assert iterations[-1] == 100
    assert f"{len(iterations)} of 100 iterations" in html


def test_long_completions_are_cut_behind_their_coloured_tokens():
    sample = {"completion": "x" * 9000, "token_lengths": [1] * 9000, "log_ratio": [0.0] * 9000}
    shown = "".join(piece["text"] for piece in pages.pieces_of(sample))
    assert shown == "x" * pages.CHARACTERS_SHOWN + " … (3000 more characters)"


@pytest.mark.parametrize("room", range(0, 60, 7))
def test_what_fits_is_as_much_as_any_even_choice(room):
    keys, sizes = list(range(10)), [5, 1, 1, 8, 1, 2, 3, 1, 1, 4]
    chosen = pages.fitting(keys, sizes, room)
    assert chosen[-1] == 9
    assert len(chosen) == 1 or (chosen[0] == 0 and sum(sizes[i] for i in chosen) <= room)
    assert chosen == sorted(set(chosen))


def test_the_order_of_unmasking_is_shown_in_a_few_stages():
    sample = {"completion": "12\n34", "token_lengths": [1, 1, 1, 1, 1], "unmasked_at": [0, 3, 1, 1, 3]}
    assert pages.stages_of(sample) == [(1, "1·\n··"), (2, "1·\n3·"), (4, "12\n34")]
    long = {"completion": "x" * 40, "token_lengths": [1] * 40, "unmasked_at": list(range(40))}
    stages = pages.stages_of(long)
    assert len(stages) == pages.STAGES
    assert stages[0] == (1, "x" + "·" * 39)
    assert stages[-1] == (40, "x" * 40)


@pytest.mark.parametrize("unmasked_at", [None, [], [0], "ab", [-1, -1], [None, "x"]])
def test_samples_without_an_order_show_none(unmasked_at):
    sample = {"completion": "ab", "token_lengths": [1, 1]}
    assert pages.stages_of(sample if unmasked_at is None else {**sample, "unmasked_at": unmasked_at}) == []
