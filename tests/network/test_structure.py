from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from lit_qrl.errors import ConfigError
from lit_qrl.network.structure import (
    FUSED_LAYERS,
    GATED_MLP,
    NORM_READERS,
    PLAIN_ATTENTION,
    RMS_NORMS,
    body,
    cached_numbers,
    check_positions,
    check_tokens,
    decoder_layers,
    implementation,
    outline,
    states,
    text_part,
)
from tests.families.configs import BY_TYPE
from tests.networks import SIZES, build_network
from tests.precision.toy import network


def test_decoder_layers_are_found_by_their_count():
    model = network()
    name, layers = decoder_layers(model)
    assert (name, layers) == ("model.layers", model.model.layers)
    model.config.num_hidden_layers = 5
    with pytest.raises(ConfigError, match="no list of 5 decoder layers"):
        decoder_layers(model)


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_the_tables_name_what_is_in_the_families(config_class):
    _, (layer, *_) = decoder_layers(build_network(config_class))
    for norm, reader in NORM_READERS.items():
        assert type(getattr(layer, norm)).__name__ in RMS_NORMS
        assert layer.get_submodule(reader).in_features == SIZES["hidden_size"]
    assert {name for name, _ in layer.mlp.named_children()} == GATED_MLP
    leaves = {name.rpartition(".")[2] for name, _ in layer.named_modules()}
    assert leaves & set(FUSED_LAYERS) == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert config_class.model_type in PLAIN_ATTENTION


def test_what_a_model_has_no_positions_or_embeddings_for_is_refused():
    config = LlamaConfig(vocab_size=32, max_position_embeddings=64)
    check_positions(config, 63, 1, "")
    with pytest.raises(ConfigError, match=r"longest sequence.*at most 64 positions.*Lower it"):
        check_positions(config, 64, 1, "Lower it.")
    check_tokens(config, [[0, 31], [5]])
    for prompts, given in (([[0], [3, 32, 40]], 32), ([[0], [-1]], -1)):
        said = rf"^Prompt 1 holds .* 0 to 31.*Given: {given}\..*model\.policy\.tokenizer"
        with pytest.raises(ConfigError, match=said):
            check_tokens(config, prompts)


def test_an_outline_takes_no_memory_and_has_the_models_names():
    config = BY_TYPE["qwen3"].config()
    made, whole = outline(config), AutoModelForCausalLM.from_config(config)
    assert list(made.state_dict()) == list(whole.state_dict())
    assert all(parameter.is_meta for parameter in made.parameters())
    assert made.lm_head.weight is made.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["llama", "gemma3", "llama4_text", "opt", "gpt2"])
def test_the_body_yields_hidden_states_and_the_text_part_is_in_it(kind):
    network = AutoModelForCausalLM.from_config(BY_TYPE[kind].config())
    hidden = body(network)(input_ids=torch.tensor([[2, 3]])).last_hidden_state
    assert hidden.shape == (1, 2, 128)
    assert text_part(network) in set(body(network).modules())
    assert network.get_output_embeddings() not in set(text_part(network).modules())


def test_layers_that_carry_a_state_are_named():
    named = {family.model_type for family in BY_TYPE.values() if states(outline(family.config()))}
    assert named == {"qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "mamba2"}
    assert states(outline(BY_TYPE["qwen3_next"].config())) == ["linear_attention"]
    assert states(SimpleNamespace(config=LlamaConfig(), _is_stateful=True)) == ["a recurrent state"]


def test_layers_may_differ_in_their_heads():
    assert cached_numbers(BY_TYPE["gemma4_text"].config()) == 2 * 2 * 32 + 2 * 2 * 64
    assert cached_numbers(BY_TYPE["deepseek_v3"].config()) == 2 * 4 * (32 + 16 + 32)  # latent attention, multiplied out


def test_a_softcap_takes_an_attention_that_has_it():
    config = BY_TYPE["gemma2"].config()
    assert implementation(config) == "eager"
    assert implementation(config, "flash_attention_2") == "flash_attention_2"
    with pytest.raises(ConfigError, match="soft-cap"):
        implementation(config, "sdpa")
    # other models leave the choice to the library
    assert implementation(Gemma3TextConfig()) is None  # the option is there, and null
    assert implementation(Gemma3TextConfig(), "sdpa") == "sdpa"
