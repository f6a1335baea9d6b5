import json

import pytest

from lit_qrl.data.tasks.countdown import Countdown, problem_key
from lit_qrl.rewards.base import Sample
from lit_qrl.rewards.simple import ConstantReward
from tests.data.tasks.test_countdown_solver import brute_force


def keys(rows):
    return {problem_key(row["numbers"], row["target"]) for row in rows}


@pytest.mark.parametrize("settings", [{}, {"max_number": 100, "max_target": 100, "train_size": 3000}])
def test_rows_are_solvable_distinct_and_disjoint(settings):
    task = Countdown(**settings)
    train, held_out = task.train_rows(), task.evaluation_rows()
    assert len(train) == settings.get("train_size", 8192)
    assert len(held_out) == 500
    assert len(keys(train)) == len(train)
    assert len(keys(held_out)) == 500
    assert not keys(train) & keys(held_out)
    for row in [*train[:200], *held_out]:
        assert any(value == row["target"] for value, _ in brute_force(row["numbers"]))
        assert all(1 <= n <= task.max_number for n in row["numbers"])
        assert 1 <= row["target"] <= task.max_target


def test_excluded_files_are_left_out_on_both_sides(tmp_path):
    plain = Countdown(train_size=50, evaluation_size=20)
    rows = [*plain.train_rows()[:10], *plain.evaluation_rows()[:5]]
    file = tmp_path / "seen.jsonl"
    lines = [{"input": ",".join(map(str, reversed(r["numbers"]))), "output": str(r["target"])} for r in rows]
    file.write_text("\n".join(map(json.dumps, lines)))
    task = Countdown(train_size=50, evaluation_size=20, exclude=[str(file)])
    assert not keys(rows) & (keys(task.train_rows()) | keys(task.evaluation_rows()))
    assert len(task.train_rows()) == 50


def test_prompts_and_correctness():
    row = {"numbers": [7, 3, 5], "target": 22}
    short, chat = Countdown(), Countdown(prompt_format="chat")
    assert short.prompt(row) == "7,3,5=22:"
    (message,) = chat.prompt(row)
    assert message["role"] == "user"
    assert all(piece in message["content"] for piece in ("7, 3, 5", "22", "<answer>"))
    texts = ["3*5+7", "5*3+7", "22", "3*5+8", "3+5+7", "7+<answer>3*5+7</answer>"]
    samples = [Sample("", text, short.reference(row), row) for text in texts]
    assert short.is_correct(samples) == [True, True, False, False, False, True]


def test_other_rewards_do_not_change_what_is_correct():
    row = {"numbers": [7, 3, 5], "target": 22}
    task = Countdown(rewards=[ConstantReward(1.0)])
    assert task.is_correct([Sample("", "3+5+7", 22, row), Sample("", "3*5+7", 22, row)]) == [False, True]
    assert [reward.name for reward in task.rewards] == ["constant"]
