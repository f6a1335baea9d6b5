from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from lit_qrl.loop.routing import balanced, load_balance, record_difference
from lit_qrl.loop.state import IterationMetrics
from lit_qrl.network.hidden import scored_hidden
from lit_qrl.network.routing import Routing, routers
from lit_qrl.objective import GRPO
from lit_qrl.types import no_all_reduce
from tests.networks import batch_of
from tests.routes import CHOSEN, EXPERTS, build_mixture


def choose_otherwise(network):
    """Let the routers choose by scores that swing with the hidden states; gates stay the model's own."""
    torch.manual_seed(3)
    for router in routers(network):
        swing = torch.randn(router.module.weight.shape[1], EXPERTS)

        def forward(hidden, weight=router.module.weight, swing=swing):
            x = hidden.flatten(0, -2)
            logits = F.linear(x, weight)
            probabilities = logits.softmax(-1)
            chosen = (probabilities + torch.sin(40 * x @ swing)).topk(CHOSEN).indices
            gates = probabilities.gather(1, chosen)
            return logits, gates / gates.sum(-1, keepdim=True), chosen

        router.module.forward = forward


def test_shares_of_differing_routes_count_known_tokens():
    def routes(*tokens):
        return torch.tensor(tokens, dtype=torch.uint8)[None, :, :, None]

    own, replayed = routes((1, 2), (1, 2), (1, 2), (255, 255)), routes((1, 2), (1, 3), (255, 255), (4, 4))
    metrics = IterationMetrics()
    record_difference(metrics, own, replayed, "free_")
    assert metrics.compute(no_all_reduce) == {
        "routing/free_differing_choices": 0.25,
        "routing/free_differing_layer_0": 0.0,
        "routing/free_differing_layer_1": 0.5,
        "routing/free_differing_tokens": 0.5,
    }


def test_load_balance_of_even_and_collapsed_routers():
    even = torch.arange(8, dtype=torch.uint8).view(1, 4, 1, 2)
    assert [float(value) for value in load_balance(even, 8).values()] == [1.0, 0.0, 0.0]
    collapsed = torch.tensor([0, 1], dtype=torch.uint8).expand(3, 5, 2, 2)
    found = load_balance(collapsed, 8)
    assert float(found["load_max"]) == 4.0
    assert float(found["load_cv"]) == pytest.approx(3**0.5)
    assert float(found["unused_experts"]) == 0.75


def test_a_routing_leaves_a_patched_router_as_it_was():
    network = build_mixture()
    choose_otherwise(network)
    gate = network.model.layers[0].mlp.gate
    patched = gate.forward
    with Routing(network).applied():
        assert gate.forward is not patched
    assert gate.forward is patched


def learner_of(network, coefficient, micro_batches=2, world_size=3):
    return SimpleNamespace(
        policy=SimpleNamespace(network=network),
        objective=GRPO(load_balance_coefficient=coefficient),
        data=SimpleNamespace(budget=SimpleNamespace(parts=micro_batches)),
        trainer=SimpleNamespace(world_size=world_size),
        iteration=SimpleNamespace(metrics=IterationMetrics()),
    )


def test_the_load_balance_loss_is_the_models_own_and_shared_by_passes_and_ranks():
    network, batch = build_mixture(), batch_of([[3, 4, 5], [6]], [[7, 8], [9, 10, 11, 12]])
    tokens = torch.tensor([[3, 4, 5, 7, 8], [6, 9, 10, 11, 12]])
    expected = network(input_ids=tokens, output_router_logits=True).aux_loss
    for coefficient, factor in ((0.5, 0.5), (None, network.config.router_aux_loss_coef)):
        learner = learner_of(network, coefficient)
        with balanced(learner) as loss:
            scored_hidden(network, batch)
        value = loss(batch)
        torch.testing.assert_close(value, expected * factor / 6, rtol=1e-5, atol=0)
        assert value.requires_grad
    with balanced(learner_of(network, 0.0)) as loss:
        scored_hidden(network, batch)
    assert loss(batch) == 0.0
