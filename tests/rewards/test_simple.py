import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.rewards import ExactMatchReward, Sample
from lit_qrl.rewards.simple import EpisodeReward
from lit_qrl.types import Episode


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("3489", 1.0),
        ("\n3489 ", 1.0),
        ("03489", 0.0),
        ("348", 0.0),
        ("34890", 0.0),
        ("3 489", 0.0),
        ("", 0.0),
        ("3490 <answer>3489</answer> 1", 1.0),
        ("3489 <answer>3490</answer>", 0.0),
        ("<answer>3490</answer><answer> 3489\n</answer>", 1.0),
        ("<answer>3489", 0.0),
    ],
)
def test_an_answer_is_right_character_for_character(completion, score):
    assert ExactMatchReward()([Sample("3141:", completion, reference="3489")]) == [score]


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
