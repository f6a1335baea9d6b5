from collections import Counter
from types import SimpleNamespace

import pytest

from lit_qrl.data.problems import PromptOrder, admit, shares
from lit_qrl.errors import ConfigError

SOURCES = ["a"] * 60 + ["b"] * 7 + ["c"] * 13


def stream(count, start=0, weights=None, seed=0):
    order = PromptOrder(SOURCES, {} if weights is None else weights, seed)
    return [order.index(position) for position in range(start, start + count)]


def test_without_weights_every_problem_comes_once_a_lap():
    laps = [stream(80, start) for start in (0, 80)]
    assert sorted(laps[0]) == sorted(laps[1]) == list(range(80))
    assert laps[0] != laps[1]


def test_a_mixture_holds_in_every_block_and_each_source_has_its_laps():
    drawn = stream(10 * 60, weights={"a": 0.5, "b": 0.3, "c": 0.2})
    for start in range(0, 600, 10):
        found = Counter(SOURCES[index] for index in drawn[start : start + 10])
        assert found == {"a": 5, "b": 3, "c": 2}
    for name, first, size in (("a", 0, 60), ("b", 60, 7), ("c", 67, 13)):
        own = [index for index in drawn if SOURCES[index] == name]
        laps = [own[i : i + size] for i in range(0, len(own) - size + 1, size)]
        assert len(laps) >= 5
        assert all(sorted(lap) == list(range(first, first + size)) for lap in laps)
        assert len({tuple(lap) for lap in laps}) == len(laps)


def test_a_mixture_follows_from_seed_and_position_alone():
    weights = {"a": 1, "b": 1, "c": 2}
    whole = stream(300, weights=weights)
    assert whole == stream(300, weights=weights) != stream(300, weights=weights, seed=1)
    assert stream(100, start=137, weights=weights) == whole[137:237]
    # Ranks take runs of positions in turn, forth and back between laps.
    order = PromptOrder(SOURCES, weights, 0)
    assert [order.index(position) for position in (250, 3, 120)] == [whole[250], whole[3], whole[120]]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 1, "b": 3}, {"a": 1, "b": 3}),
        ({"a": 0.7, "b": 0.3}, {"a": 7, "b": 3}),
        ({"a": 1 / 3, "b": 2 / 3}, {"a": 1, "b": 2}),
        ({"a": 7473, "b": 12000}, {"a": 384, "b": 616}),
    ],
)
def test_shares(weights, expected):
    found = shares(weights)
    assert {name: found[name] for name in expected} == expected or sum(found.values()) <= 1000
    total = sum(weights.values())
    for name, weight in weights.items():
        assert found[name] / sum(found.values()) == pytest.approx(weight / total, abs=1e-3)


def test_a_source_without_a_problem_is_named():
    with pytest.raises(ConfigError, match=r"source 'd' of the mixture.*leave the source out"):
        PromptOrder(SOURCES, {"a": 1, "d": 1}, 0)


POLICY = SimpleNamespace(encode_all=lambda prompts, tools: [*map(list, prompts)], decode=lambda ids: "".join(ids))
TASK = SimpleNamespace(prompt=lambda row: row["q"], tools=None)


def test_long_prompts_are_dropped_or_refused(caplog):
    rows = [{"q": "ab"}, {"q": "abcd"}]
    with caplog.at_level("INFO"):
        assert [problem.prompt_text for problem in admit(rows, TASK, POLICY, "training", 3, "drop")] == ["ab"]
    assert "Dropped 1 of 2 training prompts over 3 tokens" in caplog.text
    with pytest.raises(ConfigError, match=r"1 of 2 math evaluation prompts are too long.*up to 4 tokens"):
        admit(rows, TASK, POLICY, "math evaluation", 3, "error")
    with pytest.raises(ConfigError, match="no training rows"):
        admit([], TASK, POLICY, "training", 3, "drop")
