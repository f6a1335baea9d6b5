from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.functional.logprobs import token_logprobs
from lit_qrl.network.head import SamplerHead, check_head, check_tied, output_head
from lit_qrl.network.quantized_linear import QuantizedLinear
from tests.networks import WORDS, build_network


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (LlamaConfig, {}),
        (Gemma2Config, {"final_logit_softcapping": 3.0}),
        (CohereConfig, {"logit_scale": 0.3}),
        (GraniteConfig, {"logits_scaling": 2.5}),
    ],
)
def test_logits_are_the_models_own(config_class, changes):
    network = build_network(config_class, **changes)
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        hidden = network.base_model(input_ids=tokens).last_hidden_state
        torch.testing.assert_close(SamplerHead.of(network).logits(hidden), network(tokens).logits)
        wanted = network(tokens).logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        torch.testing.assert_close(SamplerHead.of(network).logprobs(hidden, tokens), wanted)
        torch.testing.assert_close(token_logprobs(hidden, tokens=tokens, **output_head(network))[0], wanted)


def test_a_quantized_head_gives_the_logits_and_log_probs_of_its_codes():
    format, network = formats.get("int8_channel"), build_network(Gemma2Config, final_logit_softcapping=3.0)
    hidden, tokens = torch.randn(2, 5, 32), torch.randint(len(WORDS), (2, 5))
    q = format.quantize(network.lm_head.weight.detach())
    layer = QuantizedLinear.from_linear(network.lm_head, format)
    layer.set_weight(q)
    network.set_submodule("lm_head", layer)
    head = SamplerHead.of(network)
    assert head.plain is None
    expected = 3.0 * torch.tanh(format.linear(hidden, q, None) / 3.0)
    torch.testing.assert_close(head.logits(hidden), expected)
    expected = torch.distributions.Categorical(logits=expected).log_prob(tokens)
    torch.testing.assert_close(head.logprobs(hidden, tokens), expected)


def test_only_a_head_of_its_own_can_be_quantized():
    check_head(build_network(tie_word_embeddings=False))
    with pytest.raises(ConfigError, match=r"input embedding.*tie_word_embeddings: false.*quantize_head to false"):
        check_head(build_network())
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    adapted = get_peft_model(build_network(tie_word_embeddings=False), lora)
    with pytest.raises(ConfigError, match=r"plain linear layer.*Leave lm_head out of the adapter"):
        check_head(adapted.base_model.model)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("options", [{"ensure_weight_tying": True}, {}])
def test_two_trained_copies_of_one_weight_are_refused(options):
    network = build_network()
    get_peft_model(network, LoraConfig(r=2, modules_to_save=["embed_tokens", "lm_head"], **options))
    with nullcontext() if options else pytest.raises(ConfigError, match=r"unties.*ensure_weight_tying to true"):
        check_tied(network)


def test_a_replaced_head_is_refused():
    network = build_network()
    network.lm_head = torch.nn.Sequential(network.lm_head)
    with pytest.raises(ConfigError, match="plain linear"):
        output_head(network)


def test_a_samplers_head_computes_in_the_dtype_that_is_asked_for():
    network = build_network(dtype=torch.bfloat16)
    hidden = torch.randn(3, 5, network.config.hidden_size).bfloat16()
    tokens = torch.randint(len(WORDS), (3, 5))
    exact = hidden.double() @ network.get_output_embeddings().weight.double().T
    head = SamplerHead.of(network, torch.float32)
    assert head.logits(hidden).dtype == torch.float32
    torch.testing.assert_close(head.logits(hidden).double(), exact, rtol=1e-5, atol=1e-5)
    wanted = exact.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(head.logprobs(hidden, tokens).double(), wanted, rtol=1e-5, atol=1e-5)
    assert SamplerHead.of(network).logits(hidden).dtype == torch.bfloat16
