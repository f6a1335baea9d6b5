"""The probe's bounds, when it is due, and what it says of a model in which last bits carry far."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import Precision

from lit_qrl import formats
from lit_qrl.loop.state import IterationState
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision.source import WeightSource
from lit_qrl.publish.probe import (
    FIRST_BOUND,
    FIRST_BOUND_ACTIVATIONS,
    FLOOR,
    GROWTH,
    SENSITIVITY,
    Probe,
    check_scores,
    learner_scores,
)
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.types import no_all_reduce
from tests.networks import WORDS
from tests.tiny_run import model_folder


def test_tokens_are_fixed_and_within_the_vocabulary():
    probe = Probe(len(WORDS))
    assert probe.tokens == Probe(len(WORDS)).tokens
    assert [len(sequence) for sequence in probe.tokens] == [64] * 8
    assert {token for sequence in probe.tokens for token in sequence} == set(range(len(WORDS)))


def shifted(by):
    return [torch.full((63,), by) for _ in range(8)]


def test_first_healthy_probe_is_the_baseline_of_the_later_ones():
    probe = Probe(100)
    assert not probe.compare(shifted(0.0), shifted(FIRST_BOUND + 0.01)).passed
    assert probe.baseline is None
    assert probe.compare(shifted(0.0), shifted(0.05)).passed
    assert probe.baseline == pytest.approx(0.05)
    assert probe.compare(shifted(0.0), shifted(0.05 * GROWTH - 0.001)).passed
    result = probe.compare(shifted(0.0), shifted(0.05 * GROWTH + 0.001))
    assert not result.passed
    assert result.bound == pytest.approx(0.05 * GROWTH)


def test_bounds_have_a_floor_and_depend_on_the_activations():
    exact = Probe(100)
    exact.compare(shifted(0.0), shifted(1e-6))
    assert exact.compare(shifted(0.0), shifted(FLOOR - 1e-4)).passed
    assert not exact.compare(shifted(0.0), shifted(FLOOR + 1e-4)).passed
    assert Probe(100, activations=True).compare(shifted(0.0), shifted(FIRST_BOUND_ACTIVATIONS - 0.01)).passed


def test_the_first_bound_rises_to_where_last_bits_carry():
    probe = Probe(100)
    far = shifted(FIRST_BOUND + 0.2)
    result = probe.compare(shifted(0.0), far, shifted(FIRST_BOUND + 0.1))  # carried 0.1 from `far`
    assert not result.passed
    assert result.bound == FIRST_BOUND
    result = probe.compare(shifted(0.0), far, shifted(0.1))  # carried 0.3
    assert result.passed
    assert result.bound == pytest.approx(SENSITIVITY * 0.3)
    # The baseline alone counts later.
    assert probe.compare(shifted(0.0), far, shifted(-9.0)).bound == pytest.approx(GROWTH * (FIRST_BOUND + 0.2))


def test_what_is_not_finite_fails_the_probe():
    broken = shifted(0.0)
    broken[3][5] = float("nan")
    result = Probe(100).compare(broken, shifted(0.0))
    assert (result.passed, result.nonfinite, result.mean) == (False, 1, 0.0)


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


def check(policy, shift, altered=None, engine=None):
    """Compare once; return the baseline and what was logged."""
    format = formats.get("fp8_row")
    learner = SimpleNamespace(
        policy=policy,
        data=SimpleNamespace(max_prompt_tokens=16, max_completion_tokens=8),
        iteration=IterationState(),
        trainer=SimpleNamespace(precision_plugin=Precision()),
    )
    engine = engine or Engine(policy.network, format, shift)
    baseline = check_scores(learner, engine, WeightSource(policy, format), True, altered or {}, 3, None)
    logged = learner.iteration.metrics.compute(no_all_reduce)
    assert (learner.iteration.seconds["verify"] > 0) == bool(logged)
    return baseline, logged


def test_tokens_are_no_longer_than_the_run_allows_and_the_first_difference_is_kept(policy):
    engine = Engine(policy.network, formats.get("fp8_row"), 0.25)
    engine.score, score = lambda tokens: asked.append(tokens) or score(tokens), engine.score
    asked = []
    baseline, logged = check(policy, 0.25, engine=engine)
    assert [len(sequence) for sequence in asked[0]] == [24] * 8
    assert logged["publish/probe_mean"] == pytest.approx(0.25, abs=1e-6)
    assert logged["publish/probe_bound"] == pytest.approx(FIRST_BOUND_ACTIVATIONS)
    assert baseline == pytest.approx(0.25, abs=1e-6)
    with pytest.raises(PublishError, match=r"probe: the sampler.*mean \|Δ log p\| 5.*expected"):
        check(policy, 5.0)  # further than last bits carry


def test_it_is_none_where_last_bits_alone_carry_as_far(policy):
    policy.network.model.norm.weight.data *= 40  # logits of hundreds, whose last bits are nats
    baseline, logged = check(policy, FIRST_BOUND_ACTIVATIONS + 0.05)
    assert baseline == pytest.approx(FIRST_BOUND_ACTIVATIONS + 0.05, abs=1e-5)
    format, tokens = formats.get("fp8_row"), Probe(len(WORDS), length=24).tokens
    plain, jittered = (torch.cat(learner_scores(policy.network, tokens, format, jitter=j)) for j in (0.0, 2.0**-8))
    carried = (jittered - plain).abs().mean().item()
    assert carried > FIRST_BOUND_ACTIVATIONS
    assert logged["publish/probe_bound"] == pytest.approx(SENSITIVITY * carried, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"altered": {"model.layers.0.mlp.up_proj.weight": torch.empty(0)}}, {"engine": SimpleNamespace(plain_dtype=None)}],
    ids=["the learner cannot compute the same", "the engine does not score"],
)
def test_nothing_is_compared_where_a_side_cannot(policy, options):
    assert check(policy, 9.0, **options) == (None, {})
