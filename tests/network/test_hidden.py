import pytest
import torch

from lit_qrl.network.hidden import scored_hidden
from lit_qrl.network.padding_free import enable_padding_free, flatten, prompt_tokens_shared
from lit_qrl.network.routing import Routing
from tests.networks import batch_of
from tests.routes import build_mixture, random_routes

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [4], [3, 3, 12]]
COMPLETIONS = [[4, 5, 1], [6, 7, 8, 9, 10, 11], [1], [7, 7]]


def batch_with_routes(same=5):
    """Four sequences with random routes; the first two, of one group, share those of so many tokens of their prompt."""
    batch = batch_of(PROMPTS, COMPLETIONS)
    batch.group = torch.tensor([0, 0, 1, 2])
    routes = random_routes(*batch.tokens.shape)
    width = batch.tokens.shape[1] - batch.mask.shape[1]
    start = width - len(PROMPTS[0])
    routes[1, : start + same] = routes[0, : start + same]
    if same < len(PROMPTS[0]):
        routes[1, start + same] = routes[0, start + same].flip(-1)  # the same experts, named in another order
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        routes[row, : width - len(prompt)] = 255
        routes[row, width + len(completion) - 1 :] = 255
    batch.routed_experts = routes
    return batch


def alone(network, batch, row):
    """Hidden states and own routes of one sequence by itself, every token on the experts that its row says."""
    tokens = PROMPTS[row] + COMPLETIONS[row]
    start = batch.tokens.shape[1] - batch.mask.shape[1] - len(PROMPTS[row])
    with Routing(network, batch.routed_experts[row, start : start + len(tokens)]).applied() as routing:
        hidden = network.model(torch.tensor([tokens])).last_hidden_state[0]
    return hidden[len(PROMPTS[row]) - 1 : -1], routing.own, slice(start, start + len(tokens) - 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("same", [5, 3, 0])
def test_every_token_of_a_batch_takes_its_own_route(packed, same):
    network, batch = build_mixture(), batch_with_routes(same)
    expected = [alone(network, batch, row) for row in range(len(PROMPTS))]
    assert enable_padding_free(network) if packed else True
    states, scored, own, _ = scored_hidden(network, batch, routes=True)
    torch.testing.assert_close(states, torch.cat([hidden for hidden, _, _ in expected]))
    assert scored is not None
    assert own is not None
    for row, (_, routes, columns) in enumerate(expected):
        assert torch.equal(own[row, columns], routes[:-1])
    free = scored_hidden(network, batch_of(PROMPTS, COMPLETIONS))
    assert free.routes is None
    assert (free.states - states).abs().max() > 1e-2


def test_a_prompt_is_computed_once_as_far_as_its_routes_are_equal():
    tokens = [len(flatten(batch_with_routes(same)).tokens) for same in range(len(PROMPTS[0]) + 1)]
    assert [some - tokens[-1] for some in tokens] == [5, 4, 3, 2, 1, 0]
    assert [prompt_tokens_shared(batch_with_routes(same)) for same in range(6)] == [(same, 5) for same in range(6)]


def test_gradients_of_what_is_shared_are_those_of_its_copies():
    packed, padded, batch = build_mixture(), build_mixture(), batch_with_routes(3)
    assert enable_padding_free(packed)
    for network in (packed, padded):
        scored_hidden(network, batch).states.square().sum().backward()
    pairs = zip(packed.named_parameters(), padded.parameters(), strict=True)
    found = {name: (ours.grad, theirs.grad) for (name, ours), theirs in pairs if theirs.grad is not None}
    assert "model.layers.0.self_attn.k_proj.weight" in found
    for ours, theirs in found.values():
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_all_positions_are_there_where_the_mask_is_not_looked_at(monkeypatch):
    network, batch = build_mixture(), batch_with_routes()
    some = scored_hidden(network, batch, routes=True)
    monkeypatch.setattr("lit_qrl.network.hidden.scores_all", lambda mask: True)
    states, scored, own, _ = scored_hidden(network, batch, routes=True)
    assert scored is None
    torch.testing.assert_close(states[batch.mask], some.states)
    assert torch.equal(own, some.routes)
