import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rewards import ExactMatchReward, Sample
from lit_qrl.rewards.simple import EpisodeReward
from lit_qrl.types import Episode

RIGHT = ["3489", "\n3489 ", "3490 <answer>3489</answer> 1", "<answer>3490</answer><answer> 3489\n</answer>"]
WRONG = ["03489", "348", "34890", "3 489", "", "3489 <answer>3490</answer>", "<answer>3489"]


@pytest.mark.parametrize("completion", RIGHT + WRONG)
def test_an_answer_is_right_character_for_character(completion):
    assert ExactMatchReward()([Sample("3141:", completion, reference="3489")]) == [float(completion in RIGHT)]


def test_a_reference_that_is_a_number_is_compared_as_its_text():
    reward = ExactMatchReward(weight=0.5, name="exact")
    assert reward([Sample("", "7", reference=7), Sample("", "7.0", reference=7), Sample("", "", reference=7)]) == [
        1,
        0,
        0,
    ]
    assert (reward.weight, reward.name) == (0.5, "exact")


@pytest.mark.parametrize("reference", [None, "", "  "])
def test_a_row_without_an_answer_cannot_be_scored(reference):
    reward = ExactMatchReward()
    assert reward.unscorable(Sample("", "", reference=reference)) == "its reference is empty"
    assert reward.unscorable(Sample("", "", reference=0)) is None


def test_the_score_is_the_environments_and_a_failed_one_is_left_out():
    scores = [0.25, None, 1.0]
    samples = [Sample("", "", episode=Episode(score=score, ended="done", turns=1)) for score in scores]
    assert EpisodeReward()(samples) == scores


def test_a_task_without_an_environment_is_named():
    with pytest.raises(ConfigError, match="EpisodeReward needs a task with an environment"):
        EpisodeReward()([Sample("1+1=", "2")])
