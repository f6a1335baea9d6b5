"""What every task that ships owes its users, whatever its rows are."""

import json

import pytest

from lit_qrl.data import tasks
from lit_qrl.data.task import Task
from lit_qrl.rewards.base import Reward, Sample


def rows_file(folder):
    file = folder / "rows.jsonl"
    rows = [{"question": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


BUILT = {
    "Countdown": lambda folder: tasks.Countdown(train_size=20, evaluation_size=8),
    "PrefixSum": lambda folder: tasks.PrefixSum(train_size=20, evaluation_size=8),
    "Sudoku": lambda folder: tasks.Sudoku(train_size=20, evaluation_size=8),
    "Mixture": lambda folder: tasks.Mixture(
        [
            tasks.DatasetTask(path=rows_file(folder), name="sums", evaluation_size=4),
            tasks.Countdown(train_size=20, evaluation_size=4),
        ]
    ),
    "DatasetTask": lambda folder: tasks.DatasetTask(path=rows_file(folder), name="sums", evaluation_size=8, chat=False),
}


def test_every_task_that_ships_is_here():
    shipped = {name for name, value in vars(tasks).items() if isinstance(value, type) and issubclass(value, Task)}
    elsewhere = {"Environment", "ReasoningGym"}  # their libraries are extras
    assert shipped - {"Task"} - elsewhere == set(BUILT)


@pytest.fixture(params=sorted(BUILT))
def task(request, tmp_path):
    made = BUILT[request.param](tmp_path)
    made.setup()
    return made


def test_rows_are_disjoint_and_the_same_when_read_again(task):
    train, held_out = list(task.train_rows()), list(task.evaluation_rows())
    assert len(held_out) == 8
    assert len(train) >= 12
    assert not [row for row in held_out if row in train]
    assert list(task.train_rows()) == train
    task.setup()
    assert list(task.evaluation_rows()) == held_out


def test_prompts_are_text_or_messages_that_differ(task):
    prompts = [task.prompt(row) for row in task.train_rows()]
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        assert all(message["content"].strip() for message in messages)
        assert messages[-1]["role"] == "user"
    assert len({json.dumps(prompt) for prompt in prompts}) == len(prompts)


def test_nonsense_is_wrong_and_every_sample_gets_one_score(task):
    samples = [
        Sample("", text, task.reference(row), dict(row)) for row in task.train_rows() for text in ("", "?", "no")
    ]
    assert task.is_correct(samples) == [False] * len(samples)
    assert task.is_correct([]) == []
    assert len({reward.name for reward in task.rewards}) == len(task.rewards) > 0
    assert all(isinstance(reward, Reward) for reward in task.rewards)
    scores = task.score(samples)
    assert len(scores.total) == len(samples)
    assert {name: len(values) for name, values in scores.parts.items()} == {
        reward.name: len(samples) for reward in task.rewards
    }
