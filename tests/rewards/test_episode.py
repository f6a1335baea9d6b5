import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Sample
from lit_qrl.rewards.simple import EpisodeReward
from lit_qrl.types import Episode


def test_the_score_is_the_environments_and_a_failed_one_is_left_out():
    scores = [0.25, None, 1.0]
    samples = [Sample("", "", episode=Episode(score=score, ended="done", turns=1)) for score in scores]
    assert EpisodeReward()(samples) == scores


def test_a_task_without_an_environment_is_named():
    with pytest.raises(ConfigError, match="EpisodeReward needs a task with an environment"):
        EpisodeReward()([Sample("1+1=", "2")])
