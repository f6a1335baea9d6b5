import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_qrl.rewards.math.reward import extract_answer, find_last_number, last_boxed, last_tagged, refuse


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>5</answer>", "5"),
        ("<answer>1</answer> wait <answer> 2 </answer> done", "2"),
        ("<ANSWER>5</Answer>", "5"),
        (r"<answer>\boxed{7}</answer>", "7"),
        (r"\boxed{3} <answer>4</answer> \boxed{5}", "4"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right\}}", r"\left\{ x \right\}"),
        (r"\boxed{\text{a}}}", r"\text{a}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{6} units", "6"),
        (r"\framebox{204} minutes", "204"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{1} but \boxed{2", "1"),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("so 72\n#### 72", "72"),
        ("#### 1\n#### 1,234\n", "1,234"),
        ("#### $5.50", "$5.50"),
        ("<answer></answer>", ""),
        ("Answer: 1\n\n**Answer:** $\\frac{1}{2}$\n", r"$\frac{1}{2}$"),
        ("**Final answer: 34**", "34"),
        ("Answer: 1\n#### 2", "2"),
        ("Answer: 1\n" + r"so \boxed{3}", "3"),
        ("The answer: 4", None),
        # Without a mark there is no answer.
        *(
            (text, None)
            for text in ("", "5", "the answer is 5", "<answer>5", "5</answer>", r"\boxed{5", "#### Step 3: 5")
        ),
        ("a #### 5", None),
        # Boxes beside each other are one answer.
        (r"\boxed{1} and \boxed{-2}", "1; -2"),
        (r"$\boxed{1}$, $\boxed{2}$ or \(\boxed{3}\)", "1; 2; 3"),
        (r"$x = \boxed{1}$ or $x = \boxed{2}$", "1; 2"),
        (r"\boxed{1}\text{ and }\boxed{2}", "1; 2"),
        (r"<answer>\boxed{1}; \boxed{2}</answer>", "1; 2"),
        (r"first \boxed{0}. So \boxed{1}, \boxed{2}", "1; 2"),
        (r"\boxed{5} and \boxed{5}", "5"),
        (r"\boxed{1} and hence \boxed{2}", "2"),
        (r"\boxed{1}\boxed{2}", "1; 2"),
        (r"\boxed{5} $\boxed{6}$", "5; 6"),
        (r"\boxed{(3,3)} for part (a) and \boxed{(1,1)}", "(3,3); (1,1)"),
        (r"\boxed{1} is the hand. So or not, \boxed{2}", "2"),
        (r"\boxed{1}" + "," + " " * 100 + r"\boxed{2}", "2"),
        # Backslashes that JSON doubled are halved.
        (r"so \\boxed{\\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so \\\\boxed{\\\\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\\boxed{\\{1, 2\\}}", r"\{1, 2\}"),
        (r"a \\ \boxed{\begin{pmatrix} 1 \\ x \end{pmatrix}}", r"\begin{pmatrix} 1 \\ x \end{pmatrix}"),
        (r"x = 5 \\\boxed{1 \\ 2}", r"1 \\ 2"),
    ],
)
def test_answer_is_found(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text, number",
    [
        ("pays $1,250.50 today", "$1,250.50"),
        ("it is -3.", "-3"),
        ("10-5", "5"),
        ("about 50%", "50%"),
        ("x2 = 7 apples, see A4", "7"),
        ("ratio 3/4", "3/4"),
        (".5", ".5"),
        ("none", None),
        ("5, then", "5"),
    ],
)
def test_last_number(text, number):
    assert find_last_number(text) == number


def test_last_number_is_an_option():
    assert extract_answer("I get 5", last_number=True) == "5"
    assert extract_answer("I get 5\n#### 6", last_number=True) == "6"


NINES = "9" * 350
ATTACKS = {
    "power tower": ["9**9**9**9", "9^{9^{9^{9}}}", "9^9^9", "9^{9^9}", "9^(9^(9^9))", r"\left(9^{9}\right)^{9^{9^9}}"],
    "exponent": [
        "2^{1000000}",
        "2**1000000",
        *(f"2^{power}" for power in ("3^" + NINES, NINES, f"{{-(3^{{{NINES}}})}}")),
    ],
    "characters": ["1" * 100_000],
    "digits": ["1" * 500],
    "nested": ["(" * 400 + ")" * 400, "{" * 500],
    "control": ["5\x00"],
    "factorial": ["5!!!", "1234567!"],
}


@pytest.mark.parametrize(("why", "text"), [(why, text) for why, texts in ATTACKS.items() for text in texts])
def test_attacks_are_refused(why, text):
    assert why in refuse(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "5", "x^2y^2z^2", "x^{2}y^{2}z^{2}w^{2}", "e^{x^2}", "2^{2^{3}}", "2^{2005}", "((x+1)^2+1)^2", "5!", "-3.5",
        r"\frac{\sqrt[3]{2}}{\sqrt{3}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "a^{b+c}d^{e+f}g^{h}", "1,234,567",
    ],
)  # fmt: skip
def test_answers_are_not_refused(text):
    assert refuse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 30_000,
        "<answer>" * 30_000,
        "</answer><answer>" * 20_000,
        "{" * 100_000 + "}" * 100_000,
        "\\" * 200_000,
        "#### 1" + " " * 100_000 + "x",
        "1," * 100_000,
        "-" * 200_000,
        r"\boxed" + " " * 200_000,
        "9" * 200_000,
    ],
    ids=lambda text: text[:12],
)
@pytest.mark.timeout(60)  # a quadratic scan would take many minutes
def test_hostile_text_is_read_in_one_pass(text):
    found = extract_answer(text, last_number=True)
    assert found is None or len(found) <= 2000


@given(st.text(alphabet="\\{}boxed<>/answer#0 \n", max_size=200))
def test_extraction_never_raises(text):
    for found in (extract_answer(text, last_number=True), last_boxed(text), last_tagged(text)):
        assert found is None or found in text
