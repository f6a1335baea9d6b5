from types import SimpleNamespace

import pytest

from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import base, parallel
from lit_qrl.rollout.vllm.base import VLLM
from lit_qrl.types import Completion, SamplingParams


class Engine(VLLM):
    """Draws without vLLM: every request is answered with its own tokens and seed, the last first."""

    def __init__(self):
        super().__init__()
        self.policy = SimpleNamespace(network=SimpleNamespace(config=SimpleNamespace()))
        self._usable, self.version, self.kept = True, 4, []
        self.spec = SamplerSpec(sampling=SamplingParams(max_tokens=2))

    def setup(self, spec, policy):
        pass

    def load_weights(self, tensors, format, version):
        pass

    def longest(self):
        return 99

    def _draw(self, kind, more, take):
        for one in reversed(more(False)):
            self.kept.append(one.records)
            tokens = [*one.tokens, one.seed]
            take({one.key: Completion(token_ids=tokens, logprobs=[-0.5], finish_reason="stop", version=4)})
        assert more(True) is None


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(base, "check_tokens", lambda config, prompts: None)
    return Engine()


def test_what_was_kept_is_asked_for_of_rollouts_alone(engine):
    engine.generate([[1]], 2, seed=0)
    engine.spec = SamplerSpec(kept=True, sampling=SamplingParams(max_tokens=2))
    engine.generate([[1]], 1, seed=0, sampling=SamplingParams(max_tokens=2))
    assert engine.kept == [False] * 3
    engine.generate([[1]], 1, seed=0)
    assert engine.kept[3:] == [True]


def test_completions_are_handed_out_by_their_numbers(engine):
    handed = []
    drawn = engine.generate([[1], [2, 3]], 2, seed=5, finished=handed.append)
    assert [list(one) for one in handed] == [[1], [0], [3], [2]]  # the longer prompt was asked for first
    assert {number: one for part in handed for number, one in part.items()} == dict(enumerate(drawn))


def test_a_part_of_an_engine_draws_what_all_ask_for_and_hands_out_its_own(engine, monkeypatch):
    asked = []

    def joined(prompts, numbers, call, group):
        asked.append((list(numbers), call[:2], group))
        return [[9, 9, 9], *prompts, [8]], [0, *numbers, 7], slice(1, 1 + len(prompts))

    monkeypatch.setattr(parallel, "joined", joined)
    engine.processes = "both"
    handed = []
    drawn = engine.generate([[1], [2, 3]], 2, seed=5, positions=[4, 6], finished=handed.append)
    assert asked == [([4, 6], (2, 5), "both")]
    assert [one.token_ids[:-1] for one in drawn] == [[1], [1], [2, 3], [2, 3]]
    assert {number: one for part in handed for number, one in part.items()} == dict(enumerate(drawn))
