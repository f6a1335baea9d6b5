"""When the scores are compared, and what the comparison says of a model in which last bits carry far."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import Precision

from lit_qrl import formats
from lit_qrl.policy import CausalPolicy
from lit_qrl.publish.probe import FIRST_BOUND_ACTIVATIONS, SENSITIVITY, learner_scores
from lit_qrl.publish.score_check import ScoreCheck
from lit_qrl.publish.source import WeightSource
from lit_qrl.receipts.ledger import PublishError
from tests.tiny_run import model_folder


class Engine:
    """Scores like the learner, but off by `shift` nats."""

    plain_dtype = torch.bfloat16

    def __init__(self, network, format, shift):
        self.network, self.format, self.shift = network, format, shift

    def score(self, tokens):
        return [scores + self.shift for scores in learner_scores(self.network, tokens, self.format)]


@pytest.fixture
def policy(tmp_path):
    made = CausalPolicy(model_folder(tmp_path))
    made.configure()
    return made


def check(policy, shift, scores=None, altered=None):
    """Compare once; return the check and what it logged."""
    format, scores = formats.get("fp8_row"), scores or ScoreCheck(1)
    module = SimpleNamespace(
        policy=policy,
        data=SimpleNamespace(
            engine=Engine(policy.network, format, shift), max_prompt_tokens=16, max_completion_tokens=8
        ),
        iteration={},
        seconds={"verify": 0.0},
    )
    trainer = SimpleNamespace(precision_plugin=Precision())
    scores.check(trainer, module, WeightSource(policy, None, format), True, altered or {}, version=3)
    assert module.iteration.seconds["verify"] > 0
    return scores, module.iteration


@pytest.mark.parametrize(
    ("every", "expected"),
    [(0, [False] * 4), (1, [True] * 4), (2, [True, False, True, False]), (50, [True] + [False] * 3)],
)
def test_every_nth_publish_is_due_and_a_new_engine_unless_never(every, expected):
    assert [ScoreCheck(every).due(published, False) for published in range(4)] == expected
    assert ScoreCheck(every).due(3, True) == (every > 0)


def test_tokens_are_no_longer_than_the_run_allows_and_the_first_difference_is_kept(policy):
    scores, logged = check(policy, 0.25)
    assert {len(sequence) for sequence in scores.probe.tokens} == {24}
    assert logged["publish/probe_mean"] == pytest.approx(0.25, abs=1e-6)
    assert logged["publish/probe_bound"] == FIRST_BOUND_ACTIVATIONS
    assert scores.baseline == pytest.approx(0.25, abs=1e-6)


def test_a_difference_beyond_the_bound_is_a_fault_where_last_bits_carry_no_further(policy):
    with pytest.raises(PublishError, match=r"probe: the sampler.*mean \|Δ log p\| 5.*expected"):
        check(policy, 5.0)


def test_it_is_none_where_last_bits_alone_carry_as_far(policy):
    policy.network.model.norm.weight.data *= 40  # logits of hundreds, whose last bits are nats
    scores, logged = check(policy, FIRST_BOUND_ACTIVATIONS + 0.05)
    assert scores.baseline == pytest.approx(FIRST_BOUND_ACTIVATIONS + 0.05, abs=1e-5)
    format, tokens = formats.get("fp8_row"), scores.probe.tokens
    plain, jittered = (torch.cat(learner_scores(policy.network, tokens, format, jitter=j)) for j in (0.0, 2.0**-8))
    carried = (jittered - plain).abs().mean().item()
    assert carried > FIRST_BOUND_ACTIVATIONS
    assert logged["publish/probe_bound"] == pytest.approx(SENSITIVITY * carried, rel=1e-5)


def test_nothing_is_compared_where_the_learner_cannot_compute_the_same(policy):
    scores = ScoreCheck(1)
    with pytest.raises(AssertionError):  # no time was spent
        check(policy, 9.0, scores, {"model.layers.0.mlp.up_proj.weight": torch.empty(0)})
    assert scores.probe is None
