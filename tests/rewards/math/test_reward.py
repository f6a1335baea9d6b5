import os
import subprocess
import sys

import pytest

from lit_qrl.rewards import MathReward, Sample, score_all
from lit_qrl.rewards.math.reward import gold_answers
from tests.rewards.datasets import rows


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(workers=2, timeout=60.0)  # the figures here are of judgement, on however busy a machine
    yield reward
    reward.close()


def samples(pairs, wrap="<answer>{}</answer>"):
    return [Sample("question", wrap.format(answer), gold) for gold, answer in pairs]


def test_gold_answers_of_gsm8k_are_right_in_every_form(reward):
    problems = rows("gsm8k")
    assert len(problems) == 40
    solutions = [row["answer"] for row in problems]
    golds = [solution.rpartition("#### ")[2] for solution in solutions]
    steps = [solution.rpartition("#### ")[0] for solution in solutions]
    last_number = MathReward(last_number=True)
    for completions in (
        solutions,
        [f"{text}<answer>{gold}</answer>" for text, gold in zip(steps, golds, strict=True)],
        [f"{text}So it is $\\boxed{{{gold}}}$." for text, gold in zip(steps, golds, strict=True)],
    ):
        for references in (solutions, golds):
            batch = [Sample("", c, r) for c, r in zip(completions, references, strict=True)]
            assert reward(batch) == [1.0] * len(batch)
    plain = [f"{text}The answer is {gold}." for text, gold in zip(steps, golds, strict=True)]
    assert last_number([Sample("", c, r) for c, r in zip(plain, solutions, strict=True)]) == [1.0] * len(plain)
    assert reward._pool.pids == []  # not one needed a worker


def test_altered_answers_of_gsm8k_are_wrong(reward):
    golds = [row["answer"].rpartition("#### ")[2] for row in rows("gsm8k")]
    values = [int(gold.replace(",", "")) for gold in golds]
    for alter in ("{}.5", "1{}", "{}01", "-{}1"):
        assert reward(samples([(gold, alter.format(value)) for gold, value in zip(golds, values, strict=True)])) == [
            0.0
        ] * len(golds)


def test_gold_answers_of_math500_are_right_within_their_solutions(reward):
    problems = rows("math500")
    assert len(problems) == 55
    scores = reward([Sample(row["problem"], row["solution"], row["answer"]) for row in problems])
    assert scores == [1.0] * len(problems)
    assert reward([Sample(row["problem"], row["solution"], row["solution"]) for row in problems]) == scores


HOSTILE = [
    "9**9**9**9", "9^{9^{9^{9}}}", "9^9^9", "1" * 100_000, "-" * 100_000, "(" * 10_000 + ")" * 10_000, "{" * 10_000,
    "\\frac{" * 300, "\\sqrt{" * 20 + "}" * 20, "5\x00", "\x00" * 100, "__import__('os').system('exit')", "{{}}",
    "2^3^" + "9" * 350, "\\boxed{", "\\", "$$", "}{", "&", "^", "1/0", "\\frac{1}{0}", "1e999999999", "5," * 400,
    "\\pm" * 99,
    "\\begin{pmatrix}", "\\text{", "\ud800", "\u202e5", "(lambda: 5)()", "{'a': 5}", "0x5", "5j", "nan", "\\cup" * 50,
]  # fmt: skip


def test_hostile_answers_score_zero(reward):
    for gold in ("5", "x^2+1", r"\{1,2\}"):
        assert reward(samples([(gold, answer) for answer in HOSTILE])) == [0.0] * len(HOSTILE)
        assert reward([Sample("", answer, gold) for answer in HOSTILE]) == [0.0] * len(HOSTILE)
    assert reward.failures == {}


def test_a_late_comparison_is_killed_counted_and_the_next_one_works():
    reward = MathReward(workers=1, timeout=1.0)
    late = ("1", "((99999!)!)!")
    try:
        assert reward(samples([("x+1", "1+x")])) == [1.0]
        (pid,) = reward._pool.pids
        total, _, errors = score_all([reward], samples([late, ("x+2", "2+x"), ("5", "5")]), error_reward=-1.0)
        assert total == [-1.0, 1.0, 1.0]
        assert errors == 1
        assert list(reward.failures) == [0]
        assert "not done within 1 s" in reward.failures[0]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert reward(samples([("x+3", "3+x")])) == [1.0]
        assert reward.failures == {}
    finally:
        reward.close()
    assert reward._pool.pids == []


def test_equal_pairs_are_judged_once(reward, monkeypatch):
    judged = []
    run = reward._pool.map
    monkeypatch.setattr(reward._pool, "map", lambda calls: judged.extend(calls) or run(calls))
    batch = samples([("(x+7)^2", "x^2+14x+49")] * 8 + [("(x+7)^2", "x^2+14x+48")] * 8)
    assert reward(batch) == [1.0] * 8 + [0.0] * 8
    assert len(judged) == 2


def test_any_of_several_references_is_right(reward):
    batch = [Sample("", rf"\boxed{{{answer}}}", ["1", "x+1"]) for answer in ("1", "1+x", "2", "x+2")]
    assert reward(batch) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("error", [OverflowError("int too large"), RecursionError(), MemoryError()])
def test_whatever_a_completion_brings_about_costs_that_one_alone(error, monkeypatch):
    def settled(gold, answer):
        if answer == "bad":
            raise error

    monkeypatch.setattr("lit_qrl.rewards.math.reward.settled", settled)
    reward = MathReward()
    scores = score_all([reward], samples([("5", "bad"), ("5", "5")]), error_reward=-1.0)
    assert (scores.total, scores.errors) == ([-1.0, 1.0], 1)
    assert type(error).__name__ in reward.failures[0]


def test_a_missing_reference():
    with pytest.raises(ValueError, match="needs a reference"):
        MathReward()([Sample("", r"\boxed{5}", None)])


def test_importing_the_rewards_loads_no_algebra():
    code = (
        "import sys, lit_qrl.rewards as r; s = r.Sample('', '\\\\boxed{1/2}', '0.5'); m = r.MathReward();"
        "assert m([s]) == [1.0] and not m._pool.pids;"
        "print(sorted({'sympy', 'math_verify', 'torch', 'lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_main_guard_is_needed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from lit_qrl.rewards import MathReward, Sample\n"
        "print('once')\n"
        "print(MathReward()([Sample('', r'\\boxed{1+x}', 'x+1')]))\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert result.stdout == "once\n[1.0]\n"


def test_thinking_is_skipped_by_option():
    wrong = ["<think>{}", "<think>{}</think>", r"{}</think>\boxed{{4}}", "{}<think>{}", "<think></think>{}<think>"]
    right = ["{}", r"<think>\boxed{{4}}</think>{}", r"\boxed{{4}}</think>{}", r"<Thinking>\boxed{{4}}</Thinking>{}"]
    reward = MathReward(skip_thinking=True)
    for texts, score in ((wrong, 0.0), (right, 1.0)):
        batch = [Sample("", text.format(*[r"\boxed{5}"] * 2), "5") for text in texts]
        assert reward(batch) == [score] * len(batch)
    assert MathReward()(batch) == [1.0] * len(batch)
    opened = [Sample("Answer.\n<think>\n", text, "5") for text in (r"\boxed{5}", r"\boxed{4}</think>\boxed{5}")]
    assert reward(opened) == [0.0, 1.0]


def test_decimal_commas_are_an_option():
    pairs = [("1.5", "1,5"), ("1,5", "1.5"), ("1234.5", "1.234,5"), ("1/2", "0{,}5"), ("(1.5, 2)", "(1,5; 2)")]
    reward = MathReward(decimal_comma=True)
    try:
        assert reward(samples(pairs)) == [1.0] * len(pairs)
        assert reward(samples([("15", "1,5"), ("2", "1,5"), ("1, 5", "5, 1")])) == [0.0, 0.0, 1.0]
    finally:
        reward.close()
    assert MathReward()(samples([("1.5", "1,234")])) == [0.0]


UNSCORABLE = {
    "brackets": [r"\frac{1}{2", "5}"],
    "nothing is left": ["$$"],
    "power tower": ["9^{9^{9^9}}"],
    "longer than": ["x" * 1001],
    "marks no answer": ["She has 3 apples. Then she buys 4.", r"$28 \%$. I hope it is correct."],
    "in words": ["forty two", "one hundred and twenty-five"],
    "needs a reference": [None],
    "empty": [[]],
}


@pytest.mark.parametrize(("why", "gold"), [(why, gold) for why, golds in UNSCORABLE.items() for gold in golds])
def test_a_gold_answer_that_no_completion_can_meet_is_known(why, gold):
    assert why in MathReward().unscorable(Sample("", "", gold))


SETS = {
    "math500": "answer", "gsm8k": "answer", "aime24": "answer", "aime25": "answer", "amc23": "answer",
    "minerva_math": "solution", "olympiadbench": "final_answer",
}  # fmt: skip


@pytest.mark.parametrize("name, column", SETS.items(), ids=SETS)
def test_every_gold_answer_of_the_evaluation_sets_scores_against_itself(reward, name, column):
    golds = [row[column] for row in rows(name)]
    assert [reward.unscorable(Sample("", "", gold)) for gold in golds] == [None] * len(golds)
    batch = [Sample("", rf"\boxed{{{answer}}}", gold) for gold in golds for answer in gold_answers(gold)]
    assert reward(batch) == [1.0] * len(batch)
