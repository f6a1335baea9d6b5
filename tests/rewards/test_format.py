import pytest

from lit_qrl.rewards import FormatReward, Sample


def score(completion, *arguments, **options):
    return FormatReward(*arguments, **options)([Sample("", completion)])[0]


@pytest.mark.parametrize(
    "completion, expected",
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n\n<answer> b </answer>\n", 1.0),
        ("<think>a < b</think><answer>5</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("so <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> x <answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<THINK>a</THINK><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags(completion, expected):
    assert score(completion) == expected


def test_the_prompt_may_have_opened_the_first_tag():
    assert score("a</think><answer>b</answer>", opened=True) == 1.0
    assert score("<think>a</think><answer>b</answer>", opened=True) == 0.0


def test_other_tags_and_pattern():
    assert score("<plan>a</plan>", ["plan"]) == 1.0
    assert score("a = 5", pattern=r"\w = \d") == 1.0
    assert score("a = 5!", pattern=r"\w = \d") == 0.0
    assert score("a\nb", pattern=r"a.b") == 1.0


def test_long_completions():
    assert score("<think>" * 100_000) == 0.0
    assert score("<think>" + "a" * 10**6 + "</think><answer>b</answer>") == 1.0
