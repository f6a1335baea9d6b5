from pathlib import Path

import pytest
from jsonargparse import Namespace

from lit_qrl.cli.parser import in_object
from lit_qrl.data.tasks import Countdown
from lit_qrl.rewards import FunctionReward, Sample, score_all

ROOT = Path(__file__).parents[2]
PATH = "examples.own_reward.scores"
ROW = {"numbers": [3, 5, 7], "target": 22}


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_scores():
    texts = ["3*5+7", "3*5+6", "so", "3+5+7"]
    rewards = [FunctionReward(f"{PATH}.closeness"), FunctionReward(f"{PATH}.brevity", weight=2.0, concurrency=2)]
    scores = score_all(rewards, [Sample("", text, None, ROW) for text in texts], group_size=4)
    assert scores.parts == {
        "closeness": [1.0, 0.5, None, 1 / 8],
        "brevity": [pytest.approx(1 - len(text) / 100) for text in texts],
    }
    assert scores.total == [pytest.approx(2.9), pytest.approx(2.4), None, pytest.approx(2.025)]


def test_the_yaml_names_them():
    import yaml

    content = yaml.safe_load((ROOT / "examples" / "own_reward" / "config.yaml").read_text())
    arguments = Namespace(content["data"]["task"]["init_args"])
    in_object(arguments)
    functions = [FunctionReward(**spec["init_args"]) for spec in arguments.rewards[1:]]
    assert [reward.path for reward in functions] == [f"{PATH}.closeness", f"{PATH}.brevity"]
    assert [reward.concurrency for reward in functions] == [0, 32]
    task = Countdown(train_size=8, evaluation_size=4, rewards=functions)
    row = task.train_rows()[0]
    assert score_all(task.rewards, [Sample(str(task.prompt(row)), "1", None, dict(row))]).errors == 0
