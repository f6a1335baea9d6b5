from types import SimpleNamespace

import torch

from lit_qrl.loop.evaluation import answer
from lit_qrl.types import Completion


class Echo:
    """An engine whose completions say what they were asked with."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, n, seed, progress, sampling):
        self.calls.append((n, seed, sampling.temperature, sampling.max_tokens, sampling.stop_token_ids))
        return [
            Completion(token_ids=[*prompt, i], logprobs=[0.0], finish_reason="stop", version=0)
            for prompt in prompts
            for i in range(n)
        ]


def learner(rank=0, **options):
    engine = Echo()
    task = SimpleNamespace(is_correct=lambda samples: [ids[0] % 2 == ids[-1] % 2 for ids in samples])
    data = SimpleNamespace(
        **{"evaluation_samples": 2, "evaluation_temperature": 0.7, "evaluation_greedy": True, **options},
        base_seed=3, max_completion_tokens=9, engine=engine, task=task,
        samples=lambda problems, completions: [completion.token_ids for completion in completions],
    )  # fmt: skip
    trainer = SimpleNamespace(callbacks=[], progress_bar_callback=None)
    return SimpleNamespace(trainer=trainer, data=data, policy=SimpleNamespace(stop_token_ids=(1,)), global_rank=rank)


PROBLEMS = [SimpleNamespace(prompt_ids=[4]), SimpleNamespace(prompt_ids=[5])]


def test_greedy_and_sampled_answers_are_judged_problem_by_problem():
    given = learner()
    found = answer(given, PROBLEMS, "val")
    assert list(found) == ["greedy", "sampled"]
    assert torch.equal(found["greedy"].correct, torch.tensor([[True], [False]]))
    assert torch.equal(found["sampled"].correct, torch.tensor([[True, False], [False, True]]))
    assert [one.token_ids for one in found["sampled"].completions] == [[4, 0], [4, 1], [5, 0], [5, 1]]
    (greedy, sampled) = given.data.engine.calls
    assert (greedy[0], greedy[2]) == (1, 0.0)
    assert (sampled[0], sampled[2]) == (2, 0.7)
    assert greedy[3:] == sampled[3:] == (9, (1,))


def test_every_evaluation_has_the_same_seed_and_every_rank_its_own():
    first, again, other = learner(), learner(), learner(rank=1)
    for given in (first, again, other):
        answer(given, PROBLEMS, "val")
    assert first.data.engine.calls == again.data.engine.calls
    assert first.data.engine.calls[0][1] != other.data.engine.calls[0][1]


def test_without_greedy_decoding_there_are_samples_alone():
    assert list(answer(learner(evaluation_greedy=False), PROBLEMS, "test")) == ["sampled"]
