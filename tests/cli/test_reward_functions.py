import json

import pytest
from jsonargparse import Namespace

from lit_qrl.cli.parser import CLASS_PATH, in_object, in_words
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.function import FunctionReward

HERE = "tests.cli.test_reward_functions"


def score(completions):
    return [0.0] * len(completions)


def spec(**arguments):
    return {"class_path": CLASS_PATH, "init_args": {"function": f"{HERE}.score", **arguments}}


@pytest.mark.parametrize("key", ["rewards", "rewards+"])
def test_functions_become_rewards_and_classes_stay(key):
    kept = {"class_path": "MathReward"}
    values = Namespace()
    values[key] = [f"{HERE}.score", {"class_path": f"{HERE}.score", "init_args": {"weight": 2}}, kept, "AIS"]
    in_object(values)
    assert values[key] == [spec(), spec(weight=2), kept, "AIS"]


def test_a_namespace_of_the_parser_is_taken_too():
    values = {"correct": Namespace(class_path=f"{HERE}.score", init_args=Namespace(weight=2)), "rewards": None}
    in_object(values)
    assert values == {"correct": spec(weight=2), "rewards": None}


def test_words_of_the_command_line():
    given = [f"--rewards+={HERE}.score", f"--correct={HERE}.score", f'--rewards=[{{"class_path": "{HERE}.score"}}]']
    words = in_words(given)
    assert [word.partition("=")[0] for word in words] == ["--rewards+", "--correct", "--rewards"]
    assert [json.loads(word.partition("=")[2]) for word in words] == [spec(), spec(), [spec()]]
    others = [
        "--rewards+=MathReward",
        "--rewards={",
        "--seed=1",
        "fit",
        f"--name={HERE}.score",
        "--rewards=nosuch.score",
    ]
    assert in_words(others) == others


def test_a_module_that_raises_is_named_when_the_reward_is_built(tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    values = {"rewards": ["raises_at_import.score"]}
    in_object(values)
    with pytest.raises(ConfigError, match=r"'raises_at_import.score' cannot be imported: ZeroDivisionError"):
        FunctionReward(**values["rewards"][0]["init_args"])
