from itertools import count

import pytest
import torch
from transformers import MistralConfig

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.embedded.cache import SlotCache
from lit_qrl.rollout.embedded.engine import grouped
from lit_qrl.rollout.engine import Turn
from lit_qrl.types import SamplingParams
from tests.networks import build_network
from tests.rollout.embedded.test_engine import EOS, engine_of

PROMPTS = [[5, 6, 7], [5, 6, 7], [8], [9, 9, 3, 2, 4], [8], [3, 3]]
REPLIES = [[[4, 5], [6]], [[7] * 9, []], [[2, 3, 4]], [[11], [12, 13], [4]], [], [[5, 4, 3], [10] * 4]]


class Script:
    """Conversations whose environments say what is written down; those of `late` answer every other time."""

    def __init__(self, max_tokens, late=()):
        self.tokens, self.drawn = [list(prompt) for prompt in PROMPTS], [{} for _ in PROMPTS]
        self.replies = [list(replies) for replies in REPLIES]
        self.max_tokens, self.late, self.calls = max_tokens, late, count()
        self.ready, self.over = set(range(len(PROMPTS))), set()

    @property
    def open(self):
        return len(self.over) < len(PROMPTS)

    def waiting(self, wait):
        slow = next(self.calls) % 2
        now = {index for index in self.ready if not (slow and index in self.late)}
        self.ready -= now
        return [Turn(index=i, tokens=list(self.tokens[i]), max_tokens=self.max_tokens, seed=i) for i in sorted(now)]

    def has_ended(self, index):
        return index in self.over

    def answered(self, turn, completion):
        index, at = turn.index, len(turn.tokens)
        self.drawn[index] |= {at + i: value for i, value in enumerate(completion.logprobs)}
        self.tokens[index] += completion.token_ids
        if self.replies[index]:
            self.tokens[index] += self.replies[index].pop(0)
            self.ready.add(index)
        else:
            self.over.add(index)


def converse(network, late=(), sampling=None, **options):
    """Play the script; return it, the tokens that went through the network, and the largest cache memory in tokens."""
    computed, engine = [], engine_of(network, **options)
    hook = engine.network.get_input_embeddings().register_forward_hook(
        lambda module, args, out: computed.append(args[0].numel())
    )
    script = Script(8, late)
    engine.converse(script, sampling or SamplingParams(max_tokens=8, stop_token_ids=(EOS, 9, 14)))
    hook.remove()
    return script, sum(computed)


def check(network, script):
    """Every log-prob is what a plain forward over the whole conversation says."""
    for tokens, drawn in zip(script.tokens, script.drawn, strict=True):
        with torch.no_grad():
            scores = network(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        expected = {at: float(scores[at - 1, tokens[at]]) for at in drawn}
        assert drawn == pytest.approx(expected, abs=1e-5)
        assert len(drawn) >= 1


@pytest.mark.parametrize("late", [(), (1, 3), (0, 2, 5)])
@pytest.mark.parametrize(
    "config", [{}, {"config_class": MistralConfig, "sliding_window": 5}], ids=["full attention", "a window"]
)
def test_what_is_kept_between_turns_changes_no_log_prob(config, late):
    network = build_network(**config)
    script, computed = converse(network, late)
    check(network, script)
    anew, more = converse(network, late, cache_gigabytes=1e-9)
    check(network, anew)
    assert [len(tokens) for tokens in anew.tokens] == [len(tokens) for tokens in script.tokens]
    assert computed < more


def test_a_batch_invariant_engine_computes_anew():
    network = build_network()
    script, computed = converse(network, batch_invariant=True)
    check(network, script)
    assert computed > converse(network)[1]


def test_the_new_tokens_alone_are_computed():
    network = build_network()
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_stop=True)
    script, computed = converse(network, sampling=greedy)
    check(network, script)
    first = 6 * 5  # prompts, each as long as the longest
    drawing = sum(7 * turns for turns in (6, 5, 4, 1))
    longest_replies = 5 * (9 + 1) + 4 * (4 + 1) + 1 * (1 + 1)  # with the last token drawn before it
    assert computed == first + drawing + longest_replies


def test_memory_that_runs_out_costs_what_is_kept_and_nothing_else(monkeypatch, caplog):
    network, calls = build_network(), count()
    whole = SlotCache.restore

    def restore(self, *args):
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        whole(self, *args)

    monkeypatch.setattr(SlotCache, "restore", restore)
    script, _ = converse(network)
    check(network, script)
    assert "Memory ran out while 5 sequences" in caplog.text


def test_a_dialogue_that_rewrites_what_was_said_is_computed_anew(monkeypatch):
    class Rewriting(Script):
        def answered(self, turn, completion):
            super().answered(turn, completion)
            self.tokens[turn.index][0] = 13
            if turn.index not in self.over:
                self.drawn[turn.index] = {}

    monkeypatch.setattr("tests.rollout.embedded.test_held.Script", Rewriting)
    network = build_network()
    script, _ = converse(network)
    script.tokens[4][0] = PROMPTS[4][0]  # it ended with its first answer
    check(network, script)


def test_a_prompt_beyond_the_model_is_refused_in_any_turn():
    network = build_network(max_position_embeddings=16)
    with pytest.raises(ConfigError, match="16"):
        converse(network)


def test_groups_of_unequal_size_count_one_by_one():
    turns = [Turn(index=i, tokens=[token], max_tokens=4, seed=i) for i, token in enumerate([7, 8, 7])]
    ordered, n = grouped(turns)
    assert [turn.index for turn in ordered] == [0, 2, 1]
    assert n == 1
