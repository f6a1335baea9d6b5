import json
import logging
from pathlib import Path

import datasets
import pytest
import yaml

from lit_qrl.data.tasks import DatasetTask
from lit_qrl.errors import ConfigError
from lit_qrl.rewards import ConstantReward, FormatReward, MathReward, Reward, Sample, SudokuReward
from lit_qrl.run.description import describe


def write(path, count=20, start=0, **columns):
    lines = [{"question": f"{i} + 1 = ?", "answer": str(i + 1), **columns} for i in range(start, start + count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "rows.jsonl")


def ready(*arguments, **options):
    task = DatasetTask(*arguments, **options)
    task.setup()
    return task


def questions(rows_):
    return [row["question"] for row in rows_]


def test_rows_are_held_out_by_a_seeded_draw(path):
    task = ready(path, evaluation_size=5)
    train, held_out = questions(task.train_rows()), questions(task.evaluation_rows())
    assert len(train) == 15
    assert len(held_out) == 5
    assert set(train) | set(held_out) == {f"{i} + 1 = ?" for i in range(20)}
    assert questions(ready(path, evaluation_size=5).evaluation_rows()) == held_out
    assert questions(ready(path, evaluation_size=5, seed=1).evaluation_rows()) != held_out


def test_by_default_a_tenth_is_held_out(path, tmp_path):
    assert len(ready(path).evaluation_rows()) == 2
    assert len(ready(write(tmp_path / "small.jsonl", 2)).evaluation_rows()) == 1
    assert len(ready(write(tmp_path / "large.jsonl", 6000)).evaluation_rows()) == 500


def test_evaluated_rows_are_removed_from_training_and_counted(path, tmp_path, caplog):
    evaluation = write(tmp_path / "evaluation.jsonl", 10, start=15)
    with caplog.at_level(logging.INFO):
        task = ready(path, evaluation_path=evaluation)
    assert len(task.train_rows()) == 15
    assert len(task.evaluation_rows()) == 10
    assert not set(questions(task.train_rows())) & set(questions(task.evaluation_rows()))
    assert "Removed 5 of 20 training rows" in caplog.text
    assert len(ready(path, evaluation_path=evaluation, evaluation_size=3).evaluation_rows()) == 3
    with pytest.raises(ConfigError, match=r"No training row .* is left"):
        ready(path, evaluation_path=path)
    Path(path).write_text(Path(evaluation).read_text() * 2)  # each row twice
    task = ready(path, evaluation_size=4)
    assert not set(questions(task.train_rows())) & set(questions(task.evaluation_rows()))


def test_rows_that_differ_in_spaces_and_case_are_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"question": "How  many?\\n", "answer": "1"}\n{"question": "What?", "answer": "2"}\n'
    )
    (tmp_path / "b.jsonl").write_text('{"question": "how many?", "answer": "1"}\n')
    task = ready(str(tmp_path / "a.jsonl"), evaluation_path=str(tmp_path / "b.jsonl"))
    assert questions(task.train_rows()) == ["What?"]


def test_splits_of_a_folder(tmp_path):
    write(tmp_path / "train.jsonl", 8)
    write(tmp_path / "test.jsonl", 4, start=50)
    task = ready(str(tmp_path), evaluation_split="test")
    assert (len(task.train_rows()), len(task.evaluation_rows())) == (8, 4)


def test_rows_of_several_subsets(tmp_path):
    folder = tmp_path / "levels"
    folder.mkdir()
    configs = []
    for level in (3, 4, 5):
        write(folder / f"level_{level}.jsonl", count=10, start=10 * level)
        configs.append({"config_name": f"level_{level}", "data_files": f"level_{level}.jsonl"})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    task = ready(str(folder), subset=["level_4", "level_5"], evaluation_size=3)
    found = {int(question.split()[0]) for question in questions([*task.train_rows(), *task.evaluation_rows()])}
    assert found == set(range(40, 60))
    assert len(ready(str(folder), subset="level_3", evaluation_size=1).train_rows()) == 9
    # another source has subsets of its own
    other = write(tmp_path / "held_out.jsonl", count=2, start=900)
    assert len(ready(str(folder), subset=["level_3"], evaluation_path=other).evaluation_rows()) == 2


def test_prompts(path):
    row = {"question": "2 + 2?", "answer": "4"}
    assert DatasetTask(path).prompt(row) == [{"role": "user", "content": "2 + 2?"}]
    assert DatasetTask(path, system_prompt="Think.", prompt_suffix=" Box it.").prompt(row) == [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "2 + 2? Box it."},
    ]
    assert DatasetTask(path, chat=False).prompt(row) == "2 + 2?"
    assert DatasetTask(path, chat=False, system_prompt="Think.").prompt(row) == "Think.\n\n2 + 2?"


def test_answer_pattern(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "x #### 1 #### 2\\n#### 1,000 "}\n' * 2)
    task = DatasetTask(str(tmp_path / "a.jsonl"), answer_pattern="#### (.*)")
    assert task.reference({"question": "a", "answer": "x #### 1\n#### 1,000 "}) == "1,000"
    with pytest.raises(ConfigError, match=r"Row 1 of .*no answer that answer_pattern finds"):
        ready(str(tmp_path / "a.jsonl"), answer_pattern="Answer: (.*)")


def test_row_filter(tmp_path):
    a, b = write(tmp_path / "a.jsonl", 6, level=3), write(tmp_path / "b.jsonl", 6, start=6, level=5)
    both = tmp_path / "both.jsonl"
    both.write_text(Path(a).read_text() + Path(b).read_text())
    task = ready(str(both), row_filter={"level": [4, 5]}, evaluation_size=2)
    assert {row["level"] for row in (*task.train_rows(), *task.evaluation_rows())} == {5}
    assert len(ready(str(both), row_filter={"level": ["3"]}, evaluation_size=2).train_rows()) == 4
    with pytest.raises(ConfigError, match=r"row_filter leaves no row.*'level' has: 3, 5"):
        ready(str(both), row_filter={"level": [1]})
    with pytest.raises(ConfigError, match="no column 'grade'"):
        ready(str(both), row_filter={"grade": [1]})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"answer_column": "anwser"}, r"no column 'anwser'.*Did you mean 'answer'"),
        ({"evaluation_size": 20}, r"leaves none to train on.*below its 20 rows"),
    ],
)
def test_what_setup_refuses(path, options, message):
    task = DatasetTask(path, **options)
    with pytest.raises(ConfigError, match=message):
        task.setup()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "", "answer": "1"}', "no prompt in column 'question'"),
        ('{"question": null, "answer": "1"}', "no prompt in column 'question'"),
        ('{"answer": "1"}', "no prompt in column 'question'"),
        ('{"question": "a", "answer": " "}', "no answer in column 'answer'"),
        ('{"question": "a"}', "no answer in column 'answer'"),
        (
            r'{"question": "a", "answer": "\\frac{1}{2"}',
            r"by Reward 'math' .*its brackets do not match",
        ),
        ('{"question": "a", "answer": "We add. Then we are done."}', ".*it is a text that marks no answer"),
    ],
)
def test_a_row_that_cannot_be_posed_or_solved_is_refused_by_its_number(path, line, said):
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=f"Row 21 of .*{said}"):
        ready(path)


USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


def chats(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_whose_prompt_is_a_conversation(tmp_path):
    turns = [{"role": "system", "content": "Think."}, USER]
    made = chats(tmp_path / "a.jsonl", *({"prompt": [*turns, ANSWER, {**USER, "content": f"{i}?"}], "answer": "2"}
                                         for i in range(4)))  # fmt: skip
    task = ready(made, "prompt", prompt_suffix=" Box it.", system_prompt="Not this.", evaluation_size=1)
    row = task.train_rows()[0]
    assert [turn["role"] for turn in task.prompt(row)] == ["system", "user", "assistant", "user"]
    assert task.prompt(row)[0]["content"] == "Think."
    assert task.prompt(row)[-1]["content"].endswith("? Box it.")
    assert task.reference(row) == "2"


def test_the_last_assistant_turn_of_messages_is_the_answer(tmp_path):
    rows_ = [
        {"messages": [{**USER, "content": f"{i} + 1?"}, {**ANSWER, "content": f"So #### {i + 1}"}]} for i in range(4)
    ]
    made = chats(tmp_path / "a.jsonl", *rows_)
    task = ready(made, "messages", "messages", answer_pattern="#### (.*)", evaluation_size=1)
    row = task.train_rows()[0]
    assert [turn["role"] for turn in task.prompt(row)] == ["user"]
    assert task.reference(row) == str(int(task.prompt(row)[0]["content"].split()[0]) + 1)
    with pytest.raises(ConfigError, match=r"no column 'answer', and Reward 'math'.*among messages"):
        ready(made, "messages")


def test_a_conversation_that_ends_with_an_answer_to_an_answer_is_refused_with_its_row(tmp_path):
    rows_ = [{"prompt": [USER, *answers], "answer": "2"} for answers in ([ANSWER], [ANSWER, ANSWER])]
    with pytest.raises(ConfigError, match=r"Row 2 of .* ends with nothing to answer"):
        ready(chats(tmp_path / "a.jsonl", *rows_), "prompt")


def test_a_set_that_is_only_evaluated_on_has_no_training_rows(path):
    task = ready(path, split=None)
    assert len(task.evaluation_rows()) == 20
    assert list(task.train_rows()) == []
    assert len(ready(path, split=None, evaluation_size=3).evaluation_rows()) == 3


def in_memory(kind, held):
    if kind == "generator":
        return (row for row in held)
    made = datasets.Dataset.from_list(held)
    return {"list": held, "Dataset": made, "DatasetDict": datasets.DatasetDict(train=made)}[kind]


@pytest.mark.parametrize("kind", ["list", "Dataset", "DatasetDict", "generator"])
def test_rows_held_in_python_are_those_of_a_file_and_recorded_by_a_digest(path, kind):
    held = [json.loads(line) for line in Path(path).read_text().splitlines()]
    of_file, task = ready(path), ready(in_memory(kind, held))
    assert (task.train_rows(), task.evaluation_rows()) == (of_file.train_rows(), of_file.evaluation_rows())
    recorded = describe(task)["init_args"]["path"]
    assert recorded.startswith("<20 rows of Python, ")
    assert describe(DatasetTask(held[1:]))["init_args"]["path"] != recorded
    if kind in ("list", "generator"):
        assert describe(DatasetTask(in_memory(kind, held)))["init_args"]["path"] == recorded
    with pytest.raises(ConfigError, match="in a Python program's memory"):
        ready(recorded)
    for wrong in (["a", "b"], 3):
        with pytest.raises(ConfigError, match="iterable of dictionaries"):
            DatasetTask(wrong)


def test_rows_without_answers_are_for_rewards_that_ask_for_none():
    held = [{"question": f"Write {i}.", "level": i} for i in range(20)]

    def short(completions, level):
        return [1.0 / (1 + len(text)) for text in completions]

    def agrees(completions, references):
        return [float(text == gold) for text, gold in zip(completions, references, strict=True)]

    task = ready(held, rewards=[short])
    assert task.reference(task.train_rows()[0]) is None
    assert task.is_correct([Sample("", "", columns=held[0]), Sample("", "x", columns=held[0])]) == [True, False]
    assert ready(held, rewards=[ConstantReward(1.0)]).is_correct([Sample("", "")]) == [True]
    for rewards in (None, [agrees], [short, MathReward()]):
        with pytest.raises(ConfigError, match=r"no column 'answer', and Reward .* asks for a gold answer"):
            ready(held, rewards=rewards)


def test_fewer_held_out_rows_than_asked_for_are_told(path, tmp_path, caplog):
    other = write(tmp_path / "other.jsonl", count=1, start=100)
    with caplog.at_level(logging.WARNING):
        assert len(ready(path, evaluation_path=str(other), evaluation_size=6).evaluation_rows()) == 1
    assert "evaluation_size asks for 6 problems, and there are 1" in caplog.text


def test_functions_are_rewards():
    def score(completions):
        return [float(len(completion)) for completion in completions]

    task = DatasetTask("a.jsonl", rewards=[score], correct=score)
    assert [reward.name for reward in task.rewards] == ["score"]
    assert task.is_correct([Sample("", "x"), Sample("", "")]) == [True, False]


def test_what_counts_as_correct():
    samples = [Sample("", r"\boxed{5}", "5"), Sample("", r"\boxed{6}", "5"), Sample("", "5", "5")]
    for rewards in (None, [MathReward()], [ConstantReward()], [FormatReward(["a"]), MathReward(weight=0.1)]):
        assert DatasetTask("a.jsonl", rewards=rewards).is_correct(samples) == [True, False, False]
    last = DatasetTask("a.jsonl", rewards=[ConstantReward()], correct=MathReward(last_number=True))
    assert last.is_correct(samples) == [True, False, True]
    sudoku = SudokuReward()
    assert DatasetTask("a.jsonl", rewards=[sudoku]).correct is sudoku


def test_a_judge_that_raises_counts_the_sample_as_wrong():
    class Judge(Reward):
        batched = False

        def __call__(self, samples):
            return [1.0 / len(sample.completion) for sample in samples]

    task = DatasetTask("a.jsonl", rewards=[Judge()])
    assert task.is_correct([Sample("", "x"), Sample("", ""), Sample("", "xx")]) == [True, False, False]
