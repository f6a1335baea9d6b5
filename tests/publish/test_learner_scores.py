"""The learner computing as the sampler, against explicitly quantized copies of the network."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lit_qrl import formats
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.publish.probe import learner_scores
from tests.families.configs import BY_TYPE, random_network
from tests.networks import build_network
from tests.stacked_experts import rounded

TOKENS = [[3, 5, 7, 11, 2, 9, 4, 6], [8, 8, 3, 1, 0, 10, 12, 5]]


def loop_scores(network, tokens):
    """log p of each token after the first, one sequence at a time, in fp64."""
    scores = []
    with torch.no_grad():
        for sequence in tokens:
            logits = network.double()(input_ids=torch.tensor([sequence])).logits[0, :-1]
            logprobs = logits - logits.exp().sum(dim=-1, keepdim=True).log()
            scores.append(torch.stack([logprobs[i, token] for i, token in enumerate(sequence[1:])]))
    return scores


@pytest.mark.parametrize(("name", "options"), [("int4_group", {"group_size": 8}), ("nvfp4", {}), ("bf16", {})])
def test_weight_only_formats_are_those_of_the_dequantized_network(name, options):
    format, network = formats.get(name, **options), build_network()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    expected = loop_scores(rounded(None, network, format), TOKENS)
    for score, reference in zip(learner_scores(network, TOKENS, format), expected, strict=True):
        assert torch.allclose(score.double(), reference, atol=1e-4)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert "forward" not in vars(network.model.layers[0].mlp.up_proj)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_those_of_the_rounded_network(kind):
    network, format = random_network(BY_TYPE[kind]), formats.get("nvfp4")
    network.set_experts_implementation("eager")  # the library's grouped GEMM takes no fp64
    expected = loop_scores(rounded(kind, network, format), TOKENS)
    for score, reference in zip(learner_scores(network, TOKENS, format), expected, strict=True):
        assert torch.allclose(score.double(), reference, atol=1e-4)
    plain = loop_scores(copy.deepcopy(network), TOKENS)
    assert not torch.allclose(expected[0], plain[0], atol=1e-2)
    left_out = learner_scores(network, TOKENS, format, exclude=["*"])
    assert torch.allclose(left_out[0].double(), plain[0], atol=1e-4)
    assert "forward" not in vars(network.model.layers[0].mlp.experts)


def test_activations_are_quantized_too():
    format, network = formats.get("fp8_row"), build_network()
    weights_only = loop_scores(rounded(None, network, format), TOKENS)
    difference = torch.cat(learner_scores(network, TOKENS, format)).double() - torch.cat(weights_only)
    assert 1e-3 < difference.abs().mean() < 0.5


def test_merged_and_separate_adapters():
    format, network = formats.get("nvfp4"), build_network()
    plain = copy.deepcopy(network)
    adapted = get_peft_model(network, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    merged = copy.deepcopy(adapted).merge_and_unload()
    got = torch.cat(learner_scores(adapted.base_model.model, TOKENS, format, merged=True))
    assert torch.allclose(got.double(), torch.cat(loop_scores(rounded(None, merged, format), TOKENS)), atol=1e-4)

    separate = copy.deepcopy(adapted)
    for name, layer in quantizable_linears(rounded(None, plain, format)).items():
        wrapped = separate.base_model.model.get_submodule(name)
        getattr(wrapped, "base_layer", wrapped).weight.data.copy_(layer.weight)
    expected = torch.cat(loop_scores(separate, TOKENS))
    got = torch.cat(learner_scores(adapted.base_model.model, TOKENS, format, merged=False))
    assert torch.allclose(got.double(), expected, atol=1e-4)


def test_overrides_count_once_and_are_undone():
    network = build_network()
    name = "model.layers.0.input_layernorm.weight"
    noisy = copy.deepcopy(network)
    noise = noisy.get_parameter(name).detach() + 0.3
    noisy.get_parameter(name).data.copy_(noise)
    before = network.get_parameter(name).detach().clone()
    got = torch.cat(learner_scores(network, TOKENS, overrides={name: noise}))
    assert torch.allclose(got.double(), torch.cat(loop_scores(noisy, TOKENS)), atol=1e-5)
    assert torch.equal(network.get_parameter(name), before)


def test_weights_are_cast_before_they_are_quantized():
    format, network = formats.get("nvfp4"), build_network()
    cast = copy.deepcopy(network)
    for layer in quantizable_linears(cast).values():
        layer.weight.data = layer.weight.data.bfloat16().float()
    expected = loop_scores(rounded(None, cast, format), TOKENS)
    got = learner_scores(network, TOKENS, format, dtype=torch.bfloat16)
    # Scales are divided in bf16 there and in fp32 here: codes may differ by one, log-probs by little.
    assert (torch.cat(got).double() - torch.cat(expected)).abs().mean() < 0.1


def test_a_jitter_is_a_relative_error_of_every_layers_input():
    network = build_network()
    plain = torch.cat(learner_scores(network, TOKENS))
    small, large = (torch.cat(learner_scores(network, TOKENS, jitter=2.0**-n)) for n in (12, 8))
    assert torch.equal(small, torch.cat(learner_scores(network, TOKENS, jitter=2.0**-12)))
    ratio = (large - plain).abs().mean() / (small - plain).abs().mean()
    assert 8 < ratio < 32  # linear in the jitter: 16
    assert torch.equal(torch.cat(learner_scores(network, TOKENS)), plain)
    assert not any(layer._forward_pre_hooks for layer in network.model.layers)


def test_the_head_is_quantized_where_it_is_asked_for():
    format, network = formats.get("int4_group", group_size=8), build_network(tie_word_embeddings=False)
    own = copy.deepcopy(network)
    head = own.lm_head.weight
    head.data.copy_(format.dequantize(format.quantize(head.detach())))
    expected = torch.cat(learner_scores(own, TOKENS, format))
    assert torch.equal(torch.cat(learner_scores(network, TOKENS, format, head=True)), expected)
    assert (torch.cat(learner_scores(network, TOKENS, format)) - expected).abs().mean() > 1e-3
