import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from lit_qrl.rollout import graphs
from lit_qrl.rollout.embedded.attention import FOLDED
from lit_qrl.rollout.embedded.decode import CHECK, Decoder
from lit_qrl.rollout.embedded.sampling import uniforms
from lit_qrl.rollout.graphs import Trust
from lit_qrl.types import SamplingParams
from tests.networks import build_network
from tests.rollout.graph_stand_ins import Repeated, Wrong, refused

PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 3, 12], [10, 11]]
ORDER = (0, 2, 3, 1)
ROWS = [6 * prompt + i for prompt in ORDER for i in range(6)]
SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(1,))


@pytest.fixture(scope="module")
def network():
    return build_network()


def random(prompt, steps):
    return uniforms(3, prompt, 6, steps)


def batch(network, sampling=SAMPLING):
    return Decoder(network, sampling).run(PROMPTS, 6, ROWS, random, lambda *said: None)


def in_slots(network, count, sampling=SAMPLING, trust=None, replays=False, report=lambda *said: None):
    decoder = Decoder(network, sampling, trust=trust or Trust())
    decoder.replays = replays
    return decoder.run(PROMPTS, 6, ROWS, random, report, count)


def check_same(found, expected):
    assert torch.equal(found.length, expected.length)
    assert torch.equal(found.stopped, expected.stopped)
    seen = torch.arange(expected.tokens.shape[1]) < expected.length[:, None]
    assert torch.equal(found.tokens[seen], expected.tokens[seen])
    torch.testing.assert_close(found.logprobs[seen], expected.logprobs[seen], atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [24, 9, 4, 1])
def test_slots_draw_what_a_batch_draws(network, count):
    expected = batch(network)
    assert len(set(expected.length.tolist())) > 1
    check_same(in_slots(network, count), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 9},
        {"max_tokens": 1},
        {"max_tokens": 3, "ignore_stop": True},
        {"stop_token_ids": ()},
    ],
)
def test_slots_draw_as_sampling_says(network, changes):
    sampling = SamplingParams(**{"max_tokens": 12, "stop_token_ids": (1,), **changes})
    check_same(in_slots(network, 7, sampling), batch(network, sampling))


def test_every_look_is_reported_and_the_last_one_is_exact(network):
    said = []
    drawn = in_slots(network, 5, report=lambda *numbers: said.append(numbers))
    assert said[-1] == (24, int(drawn.length.sum()))
    assert said == sorted(said)
    assert len(said) > 5


def test_prompts_are_prefilled_once_and_slots_stay_full(network, monkeypatch):
    prefilled, widths = [], []
    prefill, step = Decoder._prefilled, Decoder._step
    monkeypatch.setattr(
        Decoder, "_prefilled", lambda self, numbers, *of: prefilled.extend(numbers) or prefill(self, numbers, *of)
    )
    monkeypatch.setattr(Decoder, "_step", lambda self: widths.append(self.size) or step(self))
    drawn = in_slots(network, 8)
    assert prefilled == list(ORDER)
    # Every slot draws one row after the other: as few steps as there can be, but for the looks that come late.
    tokens = int(drawn.length.sum())
    assert tokens / 8 - 3 <= len(widths) <= tokens / 8 + 12 + 3 * 2 * CHECK
    assert set(widths) <= {8, 4, 2, 1}
    assert widths == sorted(widths, reverse=True)


@pytest.fixture
def pretend(monkeypatch):
    """Record steps on a CPU, by what stands for a graph."""

    def replay_by(graph):
        monkeypatch.setattr(graphs, "record", graph)
        monkeypatch.setattr(Repeated, "made", 0)

    return replay_by


def test_replayed_steps_are_the_launched_ones(network, pretend):
    pretend(Repeated)
    trust = Trust()
    for run in (1, 2):  # the second launches no kind of step
        check_same(in_slots(network, 9, trust=trust, replays=True), batch(network))
        assert (trust.checked, trust.broken) == (True, False)
        assert run <= Repeated.made <= run * len(trust.launched) <= 4 * run  # one for each number of rows
    assert isinstance(trust.former, Repeated)


@pytest.mark.parametrize("graph", [Wrong, refused])
def test_a_graph_that_draws_other_tokens_or_cannot_be_recorded_is_not_used(network, pretend, caplog, graph):
    pretend(graph)
    trust = Trust()
    check_same(in_slots(network, 9, trust=trust, replays=True), batch(network))
    assert trust.broken
    assert "steps are launched one by one" in caplog.text


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig])
def test_on_a_gpu_each_row_is_attended_up_to_its_own_column(config_class, monkeypatch):
    """The kernels get the column of each row, through the model's own layers; here plain operations stand for them."""
    asked = []

    def write(key, value, keys, values, last):
        row = torch.arange(len(last))
        keys[row, :, last], values[row, :, last] = key, value

    def attend(query, keys, values, last, scale):
        asked.append(last.tolist())
        seen = (torch.arange(keys.shape[2]) <= last[:, None])[:, None, None, :]
        groups = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, seen, scale=scale)
        return out[:, :, 0]

    network = build_network(config_class, **({"sliding_window": None} if config_class is MistralConfig else {}))
    network.set_attn_implementation(FOLDED)
    expected = batch(network)
    kernels = SimpleNamespace(write=write, attend=attend)
    monkeypatch.setitem(sys.modules, "lit_qrl.rollout.embedded.attention_triton", kernels)
    monkeypatch.setattr("lit_qrl.rollout.embedded.attention_triton", kernels, raising=False)
    for place in ("cache", "attention"):
        available = f"lit_qrl.rollout.embedded.{place}.dispatch.available"
        monkeypatch.setattr(available, lambda x, kernel: kernel == "decoding")
    check_same(in_slots(network, 9), expected)
    assert asked
    assert any(len(set(columns)) > 1 for columns in asked)
