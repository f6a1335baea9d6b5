import sys
from importlib import import_module

import pytest

from lit_qrl.data.tasks.reasoning_gym import ReasoningGym, ReasoningGymReward
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Sample


def test_a_missing_library_is_named_before_anything_is_drawn(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"ReasoningGym needs the library.*pip install 'lit-qrl\[environments\]'"):
        ReasoningGym("chain_sum").setup()


@pytest.fixture(scope="module")
def library():
    return import_module("reasoning_gym")


@pytest.mark.environments
def test_every_gold_answer_is_right_and_another_is_not(library):
    task = ReasoningGym(["chain_sum", "gcd"], train_size=20, evaluation_size=10, tags=False)
    rows = [*task.train_rows(), *task.evaluation_rows()]
    assert {row["metadata"]["source_dataset"] for row in rows} == {"chain_sum", "gcd"}
    right = [Sample("", row["answer"], None, dict(row)) for row in rows]
    wrong = [Sample("", row["answer"] + "1", None, dict(row)) for row in rows]
    assert all(task.is_correct(right))
    assert not any(task.is_correct(wrong))
    assert task.reference(rows[0]) == rows[0]["answer"]


@pytest.mark.environments
def test_the_answer_is_read_between_its_last_tags(library):
    row = ReasoningGym("chain_sum", train_size=1, evaluation_size=1).train_rows()[0]
    texts = [f"<answer>7</answer> no: <answer> {row['answer']} </answer>", row["answer"], "<answer>7.5</answer>"]
    assert ReasoningGymReward(tags=True)([Sample("", text, None, dict(row)) for text in texts])[:2] == [1.0, 0.0]


@pytest.mark.environments
def test_no_held_out_question_is_trained_on_and_the_seed_decides(library):
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    options = {"config": config, "train_size": 60, "evaluation_size": 40}
    task, same, other = (ReasoningGym("chain_sum", seed=seed, **options) for seed in (0, 0, 1))
    held_out = [row["question"] for row in task.evaluation_rows()]
    assert len(set(held_out)) == 40
    assert not set(held_out) & {row["question"] for row in task.train_rows()}
    assert task.train_rows() == same.train_rows() != other.train_rows()


@pytest.mark.environments
def test_levels_rise_in_the_order_of_training(library):
    task = ReasoningGym("chain_sum", levels=[0, 2], train_size=40, evaluation_size=10)
    terms = [row["metadata"]["num_terms"] for row in task.train_rows()]
    assert task.in_order
    assert set(terms[:20]) == {2}
    assert max(terms[20:]) > 2
    assert task.evaluation_rows()[0]["metadata"]["difficulty"]["num_terms"][1] > 2


@pytest.mark.environments
def test_the_prompt_is_a_chat_question_or_a_template_of_its_fields(library):
    row = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum", "expression": "1 + 2"}}
    assert ReasoningGym("chain_sum", prompt="{metadata[expression]}=").prompt(row) == "1 + 2="
    (message,) = ReasoningGym("chain_sum").prompt(row)
    assert message["content"] == "1 + 2 = Put the final answer between <answer> and </answer>."
    with pytest.raises(ConfigError, match="names a field that a problem of chain_sum lacks"):
        ReasoningGym("chain_sum", prompt="{expression}").prompt(row)


@pytest.mark.environments
@pytest.mark.parametrize(
    "given, match",
    [
        ({"task": "chain_sun"}, "Did you mean 'chain_sum'"),
        ({"task": "gcd", "levels": [77]}, "no such level. Expected: 0 to 3"),
        ({"task": "gcd", "config": {"a": 1}}, "does not take its config.*unexpected keyword argument 'a'"),
        ({"task": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "evaluation_size": 500}, "too few"),
    ],
)
def test_bad_settings_are_named(library, given, match):
    with pytest.raises(ConfigError, match=match):
        ReasoningGym(**{"train_size": 5, "evaluation_size": 5, **given}).setup()
