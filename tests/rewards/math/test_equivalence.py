import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_qrl.rewards.math.equivalence import _container, equivalent, normalize, settled
from tests.rewards.datasets import rows

PAIRS = [json.loads(line) for line in Path(__file__).with_name("math_pairs.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def verdicts():
    return [equivalent(pair["gold"], pair["answer"]) for pair in PAIRS]


def test_hand_labelled_pairs_are_judged_right_both_ways(verdicts):
    assert len(PAIRS) >= 200
    assert 0.4 < sum(pair["equal"] for pair in PAIRS) / len(PAIRS) < 0.6
    wrong = [pair for pair, verdict in zip(PAIRS, verdicts, strict=True) if verdict is not pair["equal"]]
    by_label = Counter(pair["equal"] for pair in wrong)
    for label in (True, False):
        assert by_label[label] <= 0.03 * sum(pair["equal"] is label for pair in PAIRS), wrong


def test_what_is_settled_without_algebra_agrees_with_the_full_judgement(verdicts):
    quick = [settled(pair["gold"], pair["answer"]) for pair in PAIRS]
    assert [pair for one, other, pair in zip(quick, verdicts, PAIRS, strict=True) if one not in (None, other)] == []
    assert len(PAIRS) - quick.count(None) > len(PAIRS) / 4
    assert not [pair for one, pair in zip(quick, PAIRS, strict=True) if one is None and pair["kind"] == "number"]


@given(st.integers(-(10**12), 10**12))
def test_integers_survive_every_spelling(value):
    for text in (f"{value:,}", f"{value}.00", f"${value}$", rf"\frac{{{2 * value}}}{{2}}", f"{value * 100}%"):
        assert settled(str(value), text) is True, text
    assert settled(str(value), f"{value}.5") is settled(f"{value}1", str(value)) is False


@given(st.text(max_size=200))
def test_what_is_no_answer_never_raises(text):
    assert settled("5", text) in (True, False, None)


@pytest.mark.parametrize("answer", sorted({row["answer"] for row in rows("math500")}))
def test_a_gold_answer_equals_itself_and_not_its_alterations(answer):
    assert equivalent(answer, answer)
    assert equivalent(answer, f" ${answer}$ .")
    for altered in (f"{answer} + 1", f"2 \\cdot ({answer})", f"{answer}7", f"({answer}, 1)", f"{answer}, 3141"):
        if altered not in ("2 \\cdot (0)",):
            assert not equivalent(answer, altered), altered


BROKEN = ["", " ", "\\", "{", "}", "\\frac{", "\\frac{1}{", "\\sqrt{2", "5)", "(5", "5 +", "\\text{", "x^", "_", "&"]
PARTLY = [r"5 \foo{2}", "5 @ 6", "5 = ", r"\frac{1}{2} \bar", "5 and more"]


def test_only_whole_answers_are_read_and_broken_latex_is_none():
    for answer in (*BROKEN, *PARTLY):
        for gold in ("5", "x^2", r"\frac{1}{2}"):
            assert not equivalent(gold, answer), answer


TOKENS = [*r"()[]{}|,=<>_^+-:", "\\{", "\\}", "\\cup", "\\pm", "\\text{", "x", "1", " "]


@given(st.lists(st.sampled_from(TOKENS), max_size=30))
def test_taking_answers_apart_never_raises(tokens):
    text = "".join(tokens)
    kind, members = _container(normalize(text))
    assert kind is not None or members == []
    assert settled(text, "1") in (True, False, None)
    assert settled("1", text) in (True, False, None)


@pytest.mark.parametrize(
    "gold, answer, equal",
    [
        ("-2", "1; -2", False),
        ("1, -2", "-2; 1", True),
        ("1; 2; 3", "1, 2, 3", True),
        ("(1,2), (3,4)", "(3,4); (1,2)", True),
        ("(1,2)", "(1; 2)", True),
        ("[0,1]", "[0; 1)", False),
        ("1,000; 2", "2; 1000", True),
        # A list has a member as often as it says, such as a double root, where one stands twice; a set has it once.
        ("1, 2", "1, 2, 2", True),
        ("1, 2", "1, 2, 2, 3", False),
        ("1, 1, 2", "1, 2", False),
        ("1, 1, 2", "2, 1, 1", True),
        ("1, 1, 2", r"\{1, 2\}", False),
        (r"\{1, 2\}", r"\{1, 2, 2\}", True),
        (r"\{1, 2, \frac{4}{2}\}", r"\{2, 1\}", True),
        (r"\{1, 2\}", "1, 2, 2", True),
        (r"\{1, 2\}", r"\{1, 1, 1\}", False),
        ("1, 2", r"\{2, 1, 1\}", True),
        # Braces without backslashes are not printed.
        ("(1,3)", "${1,3}$", True),
        ("(3,1)", "${1,3}$", False),
        ("(1,3)", r"\{1,3\}", False),
        (r"\{1,3\}", "{3,1}", True),
        ("5", "{5}", True),
        (r"\frac{1}{2}", r"\\frac{2}{4}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\\begin{pmatrix}2\\\\1\\end{pmatrix}", False),
    ],
)
def test_collections(gold, answer, equal):
    assert equivalent(gold, answer) is equal
