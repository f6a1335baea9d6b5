from types import SimpleNamespace

import pytest
import torch

from lit_qrl.data.benchmark import EvaluationSet, Share, answer
from lit_qrl.loop.contracts import Problem
from lit_qrl.rollout.embedded.sampling import uniforms
from lit_qrl.types import Completion


class Echo:
    """An engine whose completions say what they were asked with."""

    draws_together = False

    def __init__(self):
        self.calls = []

    def generate(self, prompts, n, seed, progress, sampling, positions=None):
        self.calls.append((n, seed, sampling, positions))
        return [
            Completion(token_ids=[*prompt, i], logprobs=[0.0], finish_reason="stop", version=0)
            for prompt in prompts
            for i in range(n)
        ]


TASK = SimpleNamespace(
    is_correct=lambda samples: [one.completion[0] % 2 == one.completion[-1] % 2 for one in samples],
    reference=lambda row: None,
)
PROBLEMS = [Problem({}, [4], ""), Problem({}, [5], "")]


def learner():
    data = SimpleNamespace(base_seed=3, engine=Echo())
    trainer = SimpleNamespace(callbacks=[], progress_bar_callback=None)
    return SimpleNamespace(trainer=trainer, data=data, policy=SimpleNamespace(stop_token_ids=(1,), decode=list))


def share(rank=0, world_size=1, problems=PROBLEMS, **options):
    plain = {"name": "", "samples": 2, "pass_at": [2], "temperature": 0.7, "top_p": 0.9, "greedy": True}
    made = EvaluationSet(**{"task": TASK, "completion_tokens": 9, **plain, **options}, problems=list(problems))
    return Share(made, rank=rank, world_size=world_size)


def test_greedy_and_sampled_answers_are_judged_problem_by_problem():
    given = learner()
    found = answer(given, share(), "val")
    assert list(found) == ["greedy", "sampled"]
    assert torch.equal(found["greedy"].correct, torch.tensor([[True], [False]]))
    assert torch.equal(found["sampled"].correct, torch.tensor([[True, False], [False, True]]))
    assert [one.token_ids for one in found["sampled"].completions] == [[4, 0], [4, 1], [5, 0], [5, 1]]
    (greedy, sampled) = given.data.engine.calls
    assert (greedy[0], greedy[2].temperature) == (1, 0.0)
    assert (sampled[0], sampled[2].temperature, sampled[2].top_p) == (2, 0.7, 0.9)
    assert {(one[2].max_tokens, one[2].stop_token_ids) for one in (greedy, sampled)} == {(9, (1,))}


def test_the_seed_is_that_of_the_set_and_a_rank_says_which_problems_it_has():
    first, again, other, benchmark = learner(), learner(), learner(), learner()
    for given, part in ((first, share()), (again, share()), (other, share(1, 2)), (benchmark, share(name="math"))):
        answer(given, part, "val")
    seeds = [given.data.engine.calls[0][1] for given in (first, again, other, benchmark)]
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3]
    assert [given.data.engine.calls[0][3] for given in (first, other)] == [None, [1]]


def test_ranks_draw_the_random_numbers_of_one_process():
    alone = torch.stack([uniforms(7, position, 3, 5) for position in range(5)])
    parts = [share(rank, 2, [SimpleNamespace(prompt_ids=[i]) for i in range(5)]) for rank in range(2)]
    assert [[problem.prompt_ids[0] for problem in part.problems] for part in parts] == [[0, 2, 4], [1, 3]]
    for part in parts:
        assert torch.equal(torch.stack([uniforms(7, i, 3, 5) for i in part.positions]), alone[part.positions])


def test_without_greedy_decoding_there_are_samples_alone_and_without_samples_greedy_ones():
    assert list(answer(learner(), share(greedy=False), "test")) == ["sampled"]
    assert list(answer(learner(), share(samples=0, pass_at=[]), "test")) == ["greedy"]


@pytest.mark.parametrize(("together", "asked"), [(False, []), (True, [(1, []), (2, [])])])
def test_a_rank_without_a_problem_asks_only_where_its_engine_is_a_part_of_one(together, asked):
    given = learner()
    given.data.engine.draws_together = together
    found = answer(given, share(rank=3, world_size=4), "val")
    assert [(n, positions) for n, _, _, positions in given.data.engine.calls] == asked
    assert {name: tuple(one.correct.shape) for name, one in found.items()} == {"greedy": (0, 1), "sampled": (0, 2)}
