from functools import partial

import pytest
import torch
from transformers import DeepseekV2Config, PhimoeConfig

from lit_qrl.errors import ConfigError
from lit_qrl.network.experts import ExpertList, expert_stacks
from lit_qrl.network.hidden import recomputation
from lit_qrl.network.routing import Routing, check_routers, differing, routers
from lit_qrl.network.structure import outline
from tests.families.configs import BY_TYPE, random_network
from tests.networks import WORDS, build_network
from tests.routes import CHOSEN, EXPERTS, LAYERS, build_mixture, random_routes

TOKENS = torch.tensor([[5, 6, 7, 8], [9, 10, 4, 3]])


def of_all(logits, routes):
    """A softmax over all experts; the chosen ones sum to 1."""
    gates = logits.softmax(-1).gather(1, routes)
    return gates / gates.sum(-1, keepdim=True)


def of_sigmoids(logits, routes, scale=1.0):
    gates = logits.sigmoid().gather(1, routes)
    return scale * gates / gates.sum(-1, keepdim=True)


def of_chosen(logits, routes):
    return logits.gather(1, routes).softmax(-1)


# What each family's paper or model card says of its gates, and where its router returns logits and gates.
FAMILIES = {
    "qwen3_moe": (of_chosen, 0, 1),  # norm_topk_prob is off in the table's model: see below
    "mixtral": (of_all, 0, 1),
    "deepseek_v3": (partial(of_sigmoids, scale=2.5), 0, 1),
    "glm4_moe": (of_sigmoids, 0, 1),
    "gpt_oss": (of_chosen, 0, 1),
    "llama4_text": (lambda logits, routes: logits.gather(1, routes).sigmoid(), 1, 0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_given_experts_and_weighs_them_by_its_own_formula(family):
    network = random_network(BY_TYPE[family], gain=2.0).eval()
    check_routers(network, "A test")
    found = routers(network)
    free = network(input_ids=TOKENS).logits
    with Routing(network).applied() as routing:
        assert torch.equal(network(input_ids=TOKENS).logits, free)
    own = routing.own
    assert own.shape == (TOKENS.numel(), len(found), found[0].chosen)
    with Routing(network, own).applied() as again:
        replayed = network(input_ids=TOKENS).logits
    assert torch.equal(replayed, free)
    assert torch.equal(again.own, own)
    losses, parameters = (replayed.square().sum(), free.square().sum()), list(network.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses))

    routes = random_routes(TOKENS.numel(), layers=len(found), experts=4, chosen=found[0].chosen)
    assert bool(differing(own, routes).any())
    outputs = []
    hooks = [one.module.register_forward_hook(lambda *given: outputs.append(given[2])) for one in found]
    with Routing(network, routes).applied():
        forced = network(input_ids=TOKENS).logits
    assert (forced - free).abs().max() > 1e-3
    formula, logits_at, gates_at = FAMILIES[family]
    formula = (lambda logits, r: logits.softmax(-1).gather(1, r)) if family == "qwen3_moe" else formula
    for layer, output in enumerate(outputs):
        chosen = routes[:, layer].long()
        gates = output[gates_at]
        if family == "llama4_text":  # writes a column for every expert, 0 outside of the choice
            assert (gates != 0).sum() == chosen.numel()
            gates = gates.gather(1, chosen)
        else:
            assert torch.equal(output[2], chosen)
        torch.testing.assert_close(gates, formula(output[logits_at], chosen).to(gates.dtype))
    for hook in hooks:
        hook.remove()
    assert torch.equal(network(input_ids=TOKENS).logits, free)  # nothing of it stays


def gradients(network, loss):
    network.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def test_a_checkpointed_layer_takes_the_same_experts_when_it_is_computed_again():
    network, routes = build_mixture(), random_routes(TOKENS.numel())
    with Routing(network, routes).applied():
        wanted = gradients(network, network(input_ids=TOKENS).logits.square().sum())
    network.train()
    network.gradient_checkpointing_enable(
        {"use_reentrant": False, "determinism_check": "none", "context_fn": recomputation}
    )
    with Routing(network, routes).applied():
        loss = network(input_ids=TOKENS).logits.square().sum()
    torch.testing.assert_close(gradients(network, loss), wanted)


def test_tokens_without_a_route_go_where_the_router_says():
    network, routes = build_mixture(), random_routes(TOKENS.numel())
    with Routing(network, torch.full_like(routes, 255)).applied() as routing:
        logits = network(input_ids=TOKENS).logits
    assert torch.equal(logits, network(input_ids=TOKENS).logits)
    some = routes.clone()
    some[4:] = 255  # the second row
    with Routing(network, some).applied():
        mixed = network(input_ids=TOKENS).logits
    with Routing(network, routes).applied():
        forced = network(input_ids=TOKENS).logits
    torch.testing.assert_close(mixed[0], forced[0])
    torch.testing.assert_close(mixed[1], logits[1])
    assert routing.own.dtype == torch.uint8


def test_many_experts_take_two_bytes():
    network = build_mixture(num_experts=300, num_hidden_layers=1)
    with Routing(network).applied() as routing:
        network(input_ids=TOKENS)
    assert routing.own.dtype == torch.int16
    assert int(routing.own.max()) > 255


def test_routers_are_found_without_a_look_at_each_expert():
    class Matrix(torch.nn.Module):
        @property
        def num_experts(self):
            raise AssertionError("an expert was looked at")

    network = outline(BY_TYPE["qwen3_moe"].config())
    expected = [router.name for router in routers(network)]
    for stack in expert_stacks(network).values():
        parent, _, leaf = stack.name.rpartition(".")
        plain = network.get_submodule(stack.name)
        setattr(network.get_submodule(parent), leaf, ExpertList(stack, plain, lambda shape: Matrix()))
    assert [router.name for router in routers(network)] == expected
    assert len(expected) > 1


def test_routes_that_do_not_fit_are_named():
    network = build_mixture()
    with pytest.raises(ValueError, match=r"Expected: layers and k \(2, 2\). Given: \(2, 3\)"):
        Routing(network, random_routes(8, chosen=3))
    for tokens in (1, 7):
        with (
            pytest.raises(ValueError, match=rf"the routes of {tokens} tokens in a forward pass of 8"),
            Routing(network, random_routes(tokens)).applied(),
        ):
            network(input_ids=TOKENS)
    assert "forward" not in network.model.layers[0].mlp.gate.__dict__


def test_routers_are_found_in_the_order_of_layers_also_without_weights():
    found = routers(outline(BY_TYPE["deepseek_v3"].config()))
    assert [(router.experts, router.chosen) for router in found] == [(4, 2)]  # the first layer is dense
    names = [router.name for router in routers(build_mixture())]
    assert names == [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]
    assert {(router.experts, router.chosen) for router in routers(build_mixture())} == {(EXPERTS, CHOSEN)}


SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MASKED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
}


@pytest.mark.parametrize(
    "network, said",
    [
        (lambda: build_network(), r"no router is found in this model.*Given: Qwen3ForCausalLM.*Remove RouterReplay"),
        (
            lambda: outline(DeepseekV2Config(**SIZES, **MASKED, topk_method="group_limited_greedy")),
            r"cannot replace what this model's routers choose.*DeepseekV2ForCausalLM with DeepseekV2TopkRouter",
        ),
        (
            lambda: outline(PhimoeConfig(**SIZES, num_key_value_heads=4, num_local_experts=4)),
            r"cannot replace.*PhimoeForCausalLM with PhimoeTopKRouter",
        ),
    ],
)
def test_models_whose_routes_cannot_be_replayed_are_refused(network, said):
    with pytest.raises(ConfigError, match=said):
        check_routers(network(), "RouterReplay")
    # a greedy router of the same class as one of those
    check_routers(outline(DeepseekV2Config(**SIZES, **MASKED, topk_method="greedy")), "RouterReplay")
