"""Drafts go through a checkpoint unchanged."""

import torch

from lit_qrl.loop.schedule import packed, unpacked, versions_of
from lit_qrl.types import Completion


def test_completions_are_packed_and_unpacked():
    completions = [
        Completion(token_ids=[], logprobs=[], finish_reason="length", version=2),
        Completion(token_ids=[5], logprobs=[-0.1], finish_reason="stop", version=3),
        Completion(token_ids=[1, 2], logprobs=[-1 / 3, -2.0], finish_reason="length", version=3),
    ]
    assert unpacked(packed(completions)) == completions
    completions.append(
        Completion(token_ids=[4, 5], logprobs=[-1.0, -0.5], finish_reason="stop", version=3, versions=[3, 4])
    )
    assert unpacked(packed(completions)) == completions
    routed = [
        Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", version=0, routed_experts=torch.ones(2, 1))
    ]
    assert torch.equal(unpacked(packed(routed))[0].routed_experts, torch.ones(2, 1))


def test_the_words_that_a_token_was_drawn_among_are_packed_too():
    kept = [torch.tensor([4, 7]), torch.tensor([5])]
    one = Completion(token_ids=[4, 5], logprobs=[-1.0, 0.0], finish_reason="stop", version=3, kept=kept)
    (again,) = unpacked(packed([one]))
    assert [ids.tolist() for ids in again.kept] == [[4, 7], [5]]


def test_every_token_has_a_version():
    two = Completion(token_ids=[4, 5], logprobs=[-1.0, -0.5], finish_reason="stop", version=3, versions=[3, 4])
    assert versions_of(two) == [3, 4]
    assert versions_of(two.cut(1)) == [3]
    assert two.cut(1).versions is None
