from types import SimpleNamespace

import pytest

from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import engine as module
from lit_qrl.rollout.vllm import requests
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.types import Completion, SamplingParams


class Engine(VLLMEngine):
    """Draws without vLLM: every request is answered with its own parameters."""

    def __init__(self):
        super().__init__()
        self.spec, self.version, self.llm = SamplerSpec(), 4, None
        self.policy = SimpleNamespace(network=SimpleNamespace(config=SimpleNamespace()))
        self._adapter_active = self._poisoned = False
        self._usable, self.resets, self.routed = True, 0, object()
        self.kept = []

    def _awake(self, complete=False):
        return None

    def longest(self):
        return 99

    def _reset_caches(self):
        self.resets += 1
        self._poisoned = False
        return True

    def _watchdog(self, what, timeout=None):
        return None


def drawing_of(sampling, seed, kept=False):
    return SimpleNamespace(max_tokens=2, seed=seed, kept=kept)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(requests, "drawing", drawing_of)
    monkeypatch.setattr(module, "check_tokens", lambda config, prompts: None)
    made = Engine()
    made.logprob = -0.5

    def run(llm, more, take, adapter, watchdog):
        for position, prompt, param in reversed(more(False)):
            take({position: (prompt, param.seed)})
        assert more(True) is None

    def completion(output, version, routed, kept):
        assert routed is made.routed
        made.kept.append(kept)
        prompt, seed = output
        return Completion(
            token_ids=[*prompt, seed], logprobs=[made.logprob], finish_reason="stop", version=version
        )  # fmt: skip

    monkeypatch.setattr(requests, "run", run)
    monkeypatch.setattr(requests, "completion", completion)
    return made


def test_what_was_kept_is_asked_for_of_rollouts_alone(engine):
    engine.generate([[1]], 2, seed=0)
    engine.spec = SamplerSpec(kept=True)
    engine.generate([[1]], 1, seed=0, sampling=SamplingParams())
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

    monkeypatch.setattr(module, "joined", joined)
    engine.processes = "both"
    handed = []
    drawn = engine.generate([[1], [2, 3]], 2, seed=5, positions=[4, 6], finished=handed.append)
    assert asked == [([4, 6], (2, 5), "both")]
    assert [one.token_ids[:-1] for one in drawn] == [[1], [1], [2, 3], [2, 3]]
    assert {number: one for part in handed for number, one in part.items()} == dict(enumerate(drawn))
