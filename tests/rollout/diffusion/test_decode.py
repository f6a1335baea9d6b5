import pytest
import torch

from lit_qrl import formats
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.rollout import graphs
from lit_qrl.rollout.diffusion.decode import Denoiser
from lit_qrl.rollout.graphs import Trust
from lit_qrl.types import SamplingParams
from tests.networks import MASK, build_denoiser
from tests.rollout.graph_stand_ins import Repeated, Wrong, refused

PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 3, 12]]
ROWS = [(0, 0), (0, 1), (1, 0), (2, 1), (2, 2)]
NUMBERS = [3 * prompt + index for prompt, index in ROWS]
LENGTH = 8


@pytest.fixture(scope="module")
def network():
    return build_denoiser()


def seed_of(prompt, index):
    return 100 * prompt + index


def run(network, block, steps, reuse="none", stops=(), numbers=NUMBERS, report=lambda *done: None, **sampling):
    params = SamplingParams(max_tokens=LENGTH, stop_token_ids=stops, **sampling)
    return Denoiser(network, params, block, steps, reuse).run(PROMPTS, 3, numbers, seed_of, report)


def slowly(network, prompt, index, block, steps, temperature):
    """The published loop, one row alone and one position at a time; returns tokens and the step of each."""
    canvas = [*PROMPTS[prompt], *[MASK] * LENGTH]
    width, when = len(PROMPTS[prompt]), [-1] * LENGTH
    noise = torch.Generator().manual_seed(seed_of(prompt, index))
    number = 0
    for start in range(0, LENGTH, block):
        for _ in range(steps):
            with torch.no_grad():
                logits = network(torch.tensor([canvas])).logits[0, width + start : width + start + block]
            logits[:, MASK] = float("-inf")
            scores = logits.double()
            if temperature:
                uniform = torch.rand(block, logits.shape[1], generator=noise, dtype=torch.float64)
                scores = scores.exp() / (-uniform.log()) ** temperature
            drawn = scores.argmax(-1).tolist()
            sure = [float(logits[i].softmax(0)[token]) for i, token in enumerate(drawn)]
            left = [i for i in range(block) if canvas[width + start + i] == MASK]
            for i in sorted(left, key=lambda i: (-sure[i], i))[: block // steps]:
                canvas[width + start + i] = drawn[i]
                when[start + i] = number
            number += 1
    return canvas[width:], when


@pytest.mark.parametrize(("block", "steps"), [(8, 8), (4, 2), (2, 2), (1, 1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_their_order_are_those_of_the_published_loop(network, block, steps, temperature):
    drawn = run(network, block, steps, temperature=temperature)
    for row, (prompt, index) in enumerate(ROWS):
        tokens, when = slowly(network, prompt, index, block, steps, temperature)
        assert drawn.tokens[row].tolist() == tokens
        assert drawn.unmasked_at[row].tolist() == when
    assert (drawn.length == LENGTH).all()
    assert not drawn.stopped.any()


def test_a_head_in_a_format_draws_what_its_numbers_say():
    network, format = build_denoiser(tie_word_embeddings=False), formats.get("fp8_row")
    weight = network.lm_head.weight.detach()
    held, quantized = QuantizedLinear(format, weight.shape), format.quantize(weight)
    held.set_weight(quantized)
    network.lm_head = torch.nn.Linear(*reversed(weight.shape), bias=False)
    network.lm_head.weight.data = format.dequantize(quantized)
    expected = run(network, 4, 2, temperature=0.0)
    network.lm_head = held
    assert run(network, 4, 2, temperature=0.0).tokens.equal(expected.tokens)


def test_positions_of_one_confidence_are_unmasked_from_the_left():
    network = build_denoiser()
    torch.nn.init.zeros_(network.lm_head.weight)  # every word is as likely as every other, wherever
    drawn = run(network, 4, 2, temperature=1.0)
    assert drawn.unmasked_at.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * len(ROWS)
    for row, (prompt, index) in enumerate(ROWS):
        assert (drawn.tokens[row].tolist(), drawn.unmasked_at[row].tolist()) == slowly(
            network, prompt, index, 4, 2, 1.0
        )


@pytest.mark.parametrize("reuse", ["prompt", "blocks"])
def test_reuse_changes_nothing_where_a_block_has_one_step(network, reuse):
    exact = run(network, 2, 1, temperature=1.0)
    kept = run(network, 2, 1, reuse, temperature=1.0)
    assert torch.equal(exact.tokens, kept.tokens)


@pytest.mark.parametrize("reuse", ["prompt", "blocks"])
def test_reuse_is_exact_in_the_first_step_of_the_first_block_alone(network, reuse):
    exact = run(network, 4, 2, temperature=0.0)
    kept = run(network, 4, 2, reuse, temperature=0.0)
    first = exact.unmasked_at == 0
    assert torch.equal(first, kept.unmasked_at == 0)
    assert torch.equal(exact.tokens[first], kept.tokens[first])
    assert (kept.tokens != MASK).all()


def test_what_is_reused_is_of_the_first_step(network):
    """The states of a later step, by hand: keys and values of the other columns are those of the first."""
    kept = run(network, 8, 4, "prompt", temperature=0.0)
    again = run(network, 8, 4, "prompt", temperature=0.0)
    whole = run(network, 8, 4, "blocks", temperature=0.0)
    assert torch.equal(kept.tokens, again.tokens)
    assert torch.equal(kept.tokens, whole.tokens)  # with one block, nothing is right of it


def test_a_sequence_ends_with_the_block_that_holds_its_stop_token(network):
    free = run(network, 2, 1, temperature=1.0)
    stop = int(free.tokens[0, 3])
    calls = []
    cut = run(network, 2, 1, stops=(stop,), temperature=1.0, report=lambda *done: calls.append(done))
    for row in range(len(ROWS)):
        found = (free.tokens[row] == stop).nonzero()
        assert bool(cut.stopped[row]) == bool(len(found))
        end = int(found[0]) + 1 if len(found) else LENGTH
        assert int(cut.length[row]) == end
        assert torch.equal(cut.tokens[row, :end], free.tokens[row, :end])
        decoded = -(-end // 2) * 2
        assert (cut.tokens[row, decoded:] == MASK).all()
    assert calls[0] == (0 if int(cut.length.min()) > 2 else int((cut.length <= 2).sum()), 2 * len(ROWS))
    assert calls[-1][0] == len(ROWS)


def test_truncation_draws_likely_tokens_alone(network):
    narrow = run(network, 1, 1, temperature=1.0, top_k=1)
    greedy = run(network, 1, 1, temperature=0.0)
    assert torch.equal(narrow.tokens, greedy.tokens)
    assert not torch.equal(run(network, 1, 1, temperature=1.0).tokens, greedy.tokens)


def replayed(network, monkeypatch, reuse, graph):
    monkeypatch.setattr(graphs, "record", graph)
    monkeypatch.setattr(Repeated, "made", 0)
    trust = Trust()
    denoiser = Denoiser(network, SamplingParams(max_tokens=LENGTH, temperature=1.0), 4, 4, reuse, graphs=trust)
    assert denoiser.graphs is None  # on a CPU
    denoiser.graphs = trust
    return denoiser, denoiser.run(PROMPTS, 3, NUMBERS, seed_of, lambda *done: None)


@pytest.mark.parametrize(("reuse", "recorded"), [("none", 1), ("prompt", 2), ("blocks", 1)])
def test_replayed_steps_are_the_launched_ones(network, monkeypatch, reuse, recorded):
    expected = run(network, 4, 4, reuse, temperature=1.0)
    denoiser, drawn = replayed(network, monkeypatch, reuse, Repeated)
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.equal(drawn.unmasked_at, expected.unmasked_at)
    assert Repeated.made == recorded  # one shape for all blocks, but where the columns that are computed get fewer
    assert denoiser.graphs.checked
    assert not denoiser.graphs.broken


@pytest.mark.parametrize("graph", [Wrong, refused])
def test_a_graph_that_draws_other_tokens_or_cannot_be_recorded_is_not_used(network, monkeypatch, caplog, graph):
    expected = run(network, 4, 4, temperature=1.0)
    denoiser, drawn = replayed(network, monkeypatch, "none", graph)
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.equal(drawn.unmasked_at, expected.unmasked_at)
    assert "steps are launched one by one" in caplog.text
    assert denoiser.graphs.broken
