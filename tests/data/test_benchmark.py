from types import SimpleNamespace

import pytest

from lit_qrl.data.benchmark import Benchmark, EvaluationSet, Share, evaluation_sets, without_benchmarks
from lit_qrl.data.problems import Problem
from lit_qrl.errors import ConfigError
from tests.tiny_run import DigitTask

OWN = {"samples": 1, "temperature": 1.0, "top_p": 1.0, "greedy": True, "completion_tokens": 16}


def sets(*benchmarks, task=None, **own):
    return evaluation_sets(task, 0, {**OWN, **own}, benchmarks)


def named(name, **options):
    return Benchmark(task=DigitTask(), name=name, **options)


def test_what_a_benchmark_leaves_out_is_as_the_evaluation_says():
    plain, own = sets(named("a"), named("b", samples=16, temperature=0.6, top_p=0.95, greedy=False), top_p=0.5)
    told = (plain.samples, plain.temperature, plain.top_p, plain.greedy, plain.completion_tokens)
    assert told == (1, 1, 0.5, True, 16)
    assert (own.samples, own.temperature, own.top_p, own.greedy, list(own.pass_at)) == (16, 0.6, 0.95, False, [16])


def test_names_of_the_accuracies():
    (task,) = sets(task=DigitTask(), samples=4)
    assert task.accuracies == {"greedy_pass@1": ("greedy", 1), "accuracy": ("sampled", 1), "pass@4": ("sampled", 4)}
    (benchmark,) = sets(named("a", samples=8, pass_at=[2, 8], greedy=False))
    assert benchmark.accuracies == {"pass@1": ("sampled", 1), "pass@2": ("sampled", 2), "pass@8": ("sampled", 8)}
    (greedy,) = sets(named("a", samples=0))
    assert greedy.accuracies == {"greedy_pass@1": ("greedy", 1)}
    assert list(greedy.decodings((1,))) == ["greedy"]
    (cold,) = sets(named("a", samples=8, temperature=0.0, greedy=False))
    assert (cold.accuracies, cold.decodings((1,))) == (greedy.accuracies, greedy.decodings((1,)))
    for own in ({"samples": 0}, {"samples": 4, "temperature": 0.0}):
        assert [one.accuracies for one in sets(named("a"), task=DigitTask(), **own)] == [greedy.accuracies] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 4, "pass_at": [0]}, "pass_at"),
        ({"samples": 0, "greedy": False}, r"a's samples is out of range.*0 and greedy: true"),
        ({"top_p": 1.5}, r"a's top_p is out of range"),
        ({"temperature": -0.5}, r"a's temperature is out of range.*0, which is greedy"),
        ({"completion_tokens": 0}, r"a's completion_tokens is out of range"),
        ({"samples": -1}, r"a's samples is out of range"),
        ({"samples": -1, "temperature": 0.0}, r"a's samples is out of range"),
        ({"size": -1}, r"a's size is out of range"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        sets(named("a", **options))


def test_names_differ_and_can_stand_in_a_metric():
    with pytest.raises(ConfigError, match=r"Two of data\.benchmarks are named 'a'.*another `name`"):
        sets(named("a"), named("a"))
    with pytest.raises(ConfigError, match="'a/b' cannot name"):
        sets(named("a/b"))
    assert [one.name for one in sets(named(None), task=DigitTask())] == ["", "digits"]


def test_shares_cover_a_set_once():
    (given,) = sets(named("a"))
    given.problems = [Problem({}, [i], "") for i in range(5)]
    parts = [Share(given, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(problem.prompt_ids[0] for part in parts for problem in part.problems) == list(range(5))
    assert [part.positions for part in parts] == [[0, 3], [1, 4], [2]]
    assert Share(given).positions is None
    assert [len(part) for part in parts] == [2, 2, 1]


def test_training_on_nothing_but_a_benchmark_is_refused():
    problem = Problem({"question": "1 + 1"}, [1], "")
    task = SimpleNamespace(key=lambda row: row["question"])
    evaluated = EvaluationSet(name="a", task=task, pass_at=[], problems=[problem], **OWN)
    with pytest.raises(ConfigError, match=r"Every training problem is one of data\.benchmarks"):
        without_benchmarks([problem], task, [evaluated])
    other = Problem({"question": "2 + 2"}, [1], "")
    assert without_benchmarks([problem, other], task, [evaluated]) == [other]
