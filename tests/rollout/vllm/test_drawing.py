import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.engine import EngineDiedError, SamplerSpec, Turn
from lit_qrl.rollout.vllm import engine as module
from lit_qrl.rollout.vllm import requests
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.types import Completion, SamplingParams


class Engine(VLLMEngine):
    """Draws without vLLM: every request is answered with its own parameters."""

    def __init__(self):
        super().__init__()
        self.spec, self.version, self.llm, self.request_seeds = SamplerSpec(), 4, None, True
        self.policy = SimpleNamespace(network=SimpleNamespace(config=SimpleNamespace()))
        self._adapter_active = self._poisoned = self._scales_due = False
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

    def run(llm, prompts, params, adapter, progress, watchdog, taken=None):
        outputs = [(prompt, param.seed) for prompt, param in zip(prompts, params, strict=True)]
        for position in reversed(range(len(outputs))) if taken is not None else ():
            taken({position: outputs[position]})
        return outputs

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


def test_completions_come_prompt_major_whatever_the_order_of_the_requests(engine):
    drawn = engine.generate([[1], [2, 3]], 2, seed=5)
    assert [one.token_ids[:-1] for one in drawn] == [[1], [1], [2, 3], [2, 3]]
    seeds = [one.token_ids[-1] for one in drawn]
    assert seeds == [requests.request_seed(5, row, sample) for row in (0, 1) for sample in (0, 1)]
    (shared,) = engine.generate([[2, 3]], 1, seed=5, positions=[1])
    assert shared.token_ids[-1] == seeds[2]
    assert shared.version == 4


def test_a_cache_that_gave_no_number_is_cleared_before_the_next_draw(engine):
    engine.logprob = math.nan
    engine.generate([[1]], 1, seed=0, sampling=SamplingParams())
    assert engine._poisoned
    engine.logprob = -1.0
    engine.generate([[1]], 1, seed=0)
    assert engine.resets == 1
    assert not engine._poisoned


def test_an_engine_that_dies_of_drawing_cannot_be_used(engine, monkeypatch):
    def die(*_):
        raise EngineDiedError("it hung")

    monkeypatch.setattr(requests, "run", die)
    with pytest.raises(EngineDiedError):
        engine.generate([[1]], 1, seed=0)
    assert not engine._usable


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


class Talk:
    """A dialogue of two sequences, whose first turns come at the second question."""

    def __init__(self):
        self.asked, self.answers = 0, []

    @property
    def open(self):
        return len(self.answers) < 2

    def waiting(self, wait):
        self.asked += 1
        return [Turn(index=i, tokens=[i, 9], max_tokens=2, seed=0) for i in range(2)] if self.asked == 2 else []

    def answered(self, turn, completion):
        self.answers.append((turn.index, completion))


@pytest.fixture
def calibrated(engine, monkeypatch):
    """The sequences that scales were taken of."""
    found = []
    engine._scales_due, engine.cache_dtype, engine.live = True, "fp8", SimpleNamespace(model=None)
    run = requests.run

    def noted(llm, prompts, params, *args):
        found.append([list(prompt) for prompt in prompts])
        return run(llm, prompts, params, *args)

    monkeypatch.setattr(requests, "run", noted)
    monkeypatch.setattr(requests, "scoring", lambda: SimpleNamespace(max_tokens=1, seed=0))
    monkeypatch.setattr(requests, "scores", lambda output, tokens: torch.zeros(len(tokens) - 1))
    monkeypatch.setattr(module.cache_scales, "observed", lambda model: nullcontext({}))
    monkeypatch.setattr(module.cache_scales, "set_scales", lambda *_: found.append("set"))
    return found


def test_scales_of_a_cache_are_of_a_conversation_s_first_turns(engine, calibrated, monkeypatch):
    def converse(llm, dialogue, draw, read, adapter, watch, begun):
        calibrated.append("drawn")
        for turn in begun:
            dialogue.answered(turn, None)
        return True

    monkeypatch.setattr(requests, "converse", converse)
    for _ in range(2):
        engine.converse(Talk())
    assert calibrated == [[[0, 9], [1, 9]], "set", "drawn", "drawn"]


def test_a_probe_leaves_the_scales_to_what_is_drawn(engine, calibrated):
    engine.score([[7, 8]])
    engine.generate([[1, 2]], 1, seed=0)
    engine.generate([[1, 2]], 1, seed=0)
    assert calibrated == [[[7, 8]], "set", [[7, 8]], [[1, 2]], "set", [[1, 2]], [[1, 2]]]
