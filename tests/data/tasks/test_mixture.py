import json
from collections import Counter
from types import SimpleNamespace

import pytest

from lit_qrl.data.module import RolloutDataModule
from lit_qrl.data.tasks import DatasetTask, Mixture
from lit_qrl.rewards import ConstantReward, MathReward
from lit_qrl.rewards.base import Sample
from lit_qrl.rollout.embedded.engine import TransformersEngine


def rows(path, count, start=0, columns=("question", "answer")):
    lines = [dict(zip(columns, (f"{i} + 1 = ?", str(i + 1)), strict=True)) for i in range(start, start + count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def tasks(tmp_path):
    """Two data sets with columns of their own, of 40 and 10 rows."""
    first = DatasetTask(rows(tmp_path / "a.jsonl", 40), name="a", evaluation_size=4, chat=False)
    second = DatasetTask(
        rows(tmp_path / "b.jsonl", 10, 100, ("problem", "solution")), "problem", "solution", name="b",
        evaluation_size=2, chat=False, prompt_suffix=" Box it.", rewards=[MathReward(), ConstantReward(0.5)],
    )  # fmt: skip
    return [first, second]


def test_every_row_is_posed_and_judged_by_its_own_task(tasks):
    mixture = Mixture(tasks)
    mixture.setup()
    assert (len(mixture.train_rows()), len(mixture.evaluation_rows())) == (44, 6)
    assert Counter(mixture.source(row) for row in mixture.train_rows()) == {"a": 36, "b": 8}
    by_source = {mixture.source(row): row for row in mixture.train_rows()}
    assert mixture.prompt(by_source["b"]).endswith("? Box it.")
    assert not mixture.prompt(by_source["a"]).endswith("Box it.")
    assert mixture.reference(by_source["b"]) == by_source["b"]["solution"]
    samples = [
        Sample("", rf"\boxed{{{mixture.reference(row)}}}" if good else r"\boxed{-1}", mixture.reference(row), dict(row))
        for good, row in ((True, by_source["b"]), (True, by_source["a"]), (False, by_source["b"]))
    ]
    assert mixture.is_correct(samples) == [True, True, False]
    scores = mixture.score(samples)
    assert scores.total == [1.5, 1.0, 0.5]
    assert scores.parts == {"math": [1.0, 1.0, 0.0], "constant": [0.5, None, 0.5]}


def test_no_problem_is_trained_on_that_another_task_evaluates(tmp_path, caplog):
    first = DatasetTask(rows(tmp_path / "a.jsonl", 20), name="a", evaluation_size=2)
    test = rows(tmp_path / "test.jsonl", 5, 10)
    second = DatasetTask(rows(tmp_path / "b.jsonl", 5, 50), name="b", evaluation_path=test)
    mixture = Mixture([first, second])
    with caplog.at_level("INFO"):
        mixture.setup()
    evaluated = {row["question"] for row in mixture.evaluation_rows()}
    assert not evaluated & {row["question"] for row in mixture.train_rows()}
    assert "that another task evaluates on" in caplog.text


def drawn(tasks, count, weights, state=None):
    data = RolloutDataModule(Mixture(tasks, weights), TransformersEngine(), prompts_per_iteration=4, seed=0)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    policy = SimpleNamespace(
        encode_all=lambda texts, tools: [list(text.encode()) for text in texts], decode=lambda ids: bytes(ids).decode()
    )
    policy.config = config
    module = SimpleNamespace(policy=policy, global_rank=0)
    data.trainer = SimpleNamespace(world_size=1, lightning_module=module)
    data.setup("fit")
    if state is not None:
        data.load_state_dict(state)
    problems = [problem for _ in range(count) for problem in data.next_problems(4)]
    return problems, data.state_dict()


def test_weights_hold_in_the_stream_of_the_data_module_and_it_goes_on_from_a_checkpoint(tasks):
    whole, _ = drawn(tasks, 20, [1, 3])
    assert Counter(problem.row["source_task"] for problem in whole) == {"a": 20, "b": 60}
    _, state = drawn(tasks, 7, [1, 3])
    rest, _ = drawn(tasks, 13, [1, 3], state)
    assert [problem.prompt_text for problem in rest] == [problem.prompt_text for problem in whole[28:]]
