from collections import Counter

import pytest

from lit_qrl.data.tasks import PrefixSum
from lit_qrl.data.tasks.prefix_sum import running_sums
from lit_qrl.errors import ConfigError
from lit_qrl.rewards import Sample, score_all


def sums_in_a_loop(digits):
    return "".join(str(sum(int(digit) for digit in digits[: n + 1]) % 10) for n in range(len(digits)))


def test_problems_are_digits_and_every_reference_is_their_running_sums():
    task = PrefixSum(digits=12, train_size=300, evaluation_size=100)
    rows = [*task.train_rows(), *task.evaluation_rows()]
    assert len({row["digits"] for row in rows}) == 400
    for row in rows:
        assert len(row["digits"]) == 12
        assert task.reference(row) == sums_in_a_loop(row["digits"])
    assert running_sums("9999999999") == "9876543210"
    counts = Counter("".join(row["digits"] for row in rows))
    assert set(counts) == set("0123456789")
    assert all(380 < count < 580 for count in counts.values())  # 480 expected, deviation 21


def test_prompts_and_scores():
    task, row = PrefixSum(digits=5), {"digits": "31415"}
    assert task.prompt(row) == "31415:"
    (message,) = PrefixSum(digits=5, prompt_format="chat").prompt(row)
    assert message["role"] == "user"
    assert "3 1 4 1 5" in message["content"]
    assert "give the 5 digits" in message["content"]
    samples = [
        Sample("", text, task.reference(row), row) for text in ("34894", "34893", "3489", "<answer>34894</answer>")
    ]
    assert score_all(task.rewards, samples).total == [1.0, 0.0, 0.0, 1.0]
    assert task.is_correct(samples) == [True, False, False, True]


def test_problems_of_a_file(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"digits": "0123"}\n{"digits": "99999999"}\n')
    task = PrefixSum(digits=4, train_size=50, evaluation_path=str(tmp_path / "mine.jsonl"))
    assert [task.reference(row) for row in task.evaluation_rows()] == ["0136", "98765432"]
    assert "0123" not in {row["digits"] for row in task.train_rows()}


@pytest.mark.parametrize("digits", ["123", '"12 3"', '""', '"1.5"', '"³"'])
def test_a_row_that_is_no_problem(tmp_path, digits):
    (tmp_path / "mine.jsonl").write_text(f'{{"digits": {digits}}}\n')
    with pytest.raises(ConfigError, match=r"Row 1 of .*not a problem of PrefixSum.*Keep the column as text"):
        PrefixSum(train_size=1, evaluation_path=str(tmp_path / "mine.jsonl")).setup()


def test_too_few_digits():
    with pytest.raises(ConfigError, match=r"PrefixSum has too few different problems for"):
        PrefixSum(digits=2, train_size=1, evaluation_size=50).setup()
