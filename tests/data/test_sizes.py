"""Which sizes fit each other; the data module asks, and tests/data/test_module.py holds its words."""

from types import SimpleNamespace

import pytest

from lit_qrl.data.module import RolloutDataModule, check_ranks, check_sizes
from lit_qrl.errors import ConfigError
from lit_qrl.rollout import TransformersEngine
from tests.tiny_run import DigitTask

SIZES = {
    "prompts_per_iteration": 12, "group_size": 4, "passes": 1, "mini_batches": 2, "micro_batches": 3,
    "max_prompt_tokens": 8, "max_completion_tokens": 8, "evaluation_samples": 1, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "evaluation_limit": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"group_size": 0}, "group_size is too small"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"top_p": 1.5}, "top_p is out of range"),
        ({"top_k": -5}, "data.top_k is too small"),
        ({"evaluation_limit": -1}, "data.evaluation_limit is too small"),
        ({"mini_batches": 5}, "not divisible by data.mini_batches"),
        ({"micro_batches": 7}, "not divisible by data.micro_batches"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change, words):
    check_sizes(SimpleNamespace(**SIZES))
    with pytest.raises(ConfigError, match=words):
        check_sizes(SimpleNamespace(**{**SIZES, **change}))


def test_the_former_name_of_the_limit_of_an_evaluation_counts():
    made = [RolloutDataModule(DigitTask(), TransformersEngine(), **given) for given in ({"evaluation_size": 4}, {})]
    assert [data.evaluation_limit for data in made] == [4, 0]
    assert [data.evaluations[0].size for data in made] == [4, 0]


def test_groups_divide_over_ranks():
    data = SimpleNamespace(**SIZES)
    check_ranks(data, 3)
    with pytest.raises(ConfigError, match="does not divide over the ranks") as error:
        check_ranks(data, 4)
    assert "Set it to 16" in str(error.value)
    data.micro_batches = 9
    with pytest.raises(ConfigError, match="at most 8, since 3 ranks"):
        check_ranks(data, 3)
