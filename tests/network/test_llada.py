import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lit_qrl.errors import ConfigError
from lit_qrl.network.llada import LLaDAForMaskedDiffusion, as_llama
from tests.networks import WORDS

HEADS, DIM, LAYERS, THETA, EPS, VOCABULARY = 2, 16, 2, 500_000.0, 1e-5, len(WORDS) + 1
OFF = ("alibi", "attention_layer_norm", "bias_for_layer_norm", "include_bias", "include_qkv_bias", "input_emb_norm")
PUBLISHED = {
    **dict.fromkeys((*OFF, "scale_logits", "weight_tying"), False),
    "activation_type": "silu",
    "architectures": ["LLaDAModelLM"],
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "block_type": "llama",
    "d_model": DIM,
    "embedding_size": VOCABULARY,
    "eos_token_id": 1,
    "layer_norm_type": "rms",
    "mask_token_id": VOCABULARY - 1,
    "max_sequence_length": 64,
    "mlp_hidden_size": 24,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "n_layers": LAYERS,
    "pad_token_id": 0,
    "rms_norm_eps": EPS,
    "rope": True,
    "rope_theta": THETA,
    "vocab_size": VOCABULARY,
}


def published_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    weights = {
        "wte.weight": draw(VOCABULARY, DIM),
        "ln_f.weight": 1 + draw(DIM),
        "ff_out.weight": draw(VOCABULARY, DIM),
    }
    for i in range(LAYERS):
        block = {"attn_norm": 1 + draw(DIM), "ff_norm": 1 + draw(DIM), "ff_out": draw(DIM, 24)}
        block |= {name: draw(DIM, DIM) for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        block |= {name: draw(24, DIM) for name in ("ff_proj", "up_proj")}
        weights |= {f"blocks.{i}.{name}.weight": tensor for name, tensor in block.items()}
    return {f"model.transformer.{name}": tensor.contiguous() for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as LLaDA's authors publish it, without the code that its `auto_map` names."""
    path = tmp_path_factory.mktemp("llada")
    (path / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(published_weights(), path / "model.safetensors", metadata={"format": "pt"})
    return path


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x):
    """Rotary embedding "t heads d" that turns the halves of each head, as OLMo's and LLaDA's."""
    t, _, d = x.shape
    angles = torch.arange(t)[:, None] * THETA ** (-torch.arange(0, d, 2) / d)
    cos, sin = torch.cos(angles)[:, None], torch.sin(angles)[:, None]
    left, right = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def by_hand(weights, tokens):
    """LLaDA's forward pass of one sequence: every position sees every other."""
    get = {name.removeprefix("model.transformer."): tensor.double() for name, tensor in weights.items()}
    x = get["wte.weight"][tokens]
    for i in range(LAYERS):
        own = {name.removeprefix(f"blocks.{i}."): one for name, one in get.items() if name.startswith(f"blocks.{i}.")}
        h = norm(x, own["attn_norm.weight"])
        q, k, v = (
            (h @ own[f"{name}_proj.weight"].T).view(len(tokens), HEADS, DIM // HEADS) for name in ("q", "k", "v")
        )
        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / math.sqrt(DIM // HEADS)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(tokens), DIM)
        x = x + mixed @ own["attn_out.weight"].T
        h = norm(x, own["ff_norm.weight"])
        gate = torch.nn.functional.silu(h @ own["ff_proj.weight"].T)
        x = x + (gate * (h @ own["up_proj.weight"].T)) @ own["ff_out.weight"].T
    return norm(x, get["ln_f.weight"]) @ get["ff_out.weight"].T


def test_a_published_folder_computes_as_llada_does(folder):
    network, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(network) is LLaDAForMaskedDiffusion
    tokens = torch.tensor([4, 9, VOCABULARY - 1, 7, 2])
    with torch.no_grad():
        got = network(tokens[None]).logits[0].double()
    torch.testing.assert_close(got, by_hand(published_weights(), tokens), atol=1e-4, rtol=1e-4)


def test_the_config_says_what_the_published_one_says(folder):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    assert (config.is_causal, config.mask_token_id, config.tie_word_embeddings) == (False, VOCABULARY - 1, False)
    assert config.max_position_embeddings == 64
    assert as_llama({**PUBLISHED, "mlp_hidden_size": None})["intermediate_size"] == 4 * DIM


def test_saving_and_loading_keeps_every_weight(folder, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(published_weights())
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in network.state_dict().items())


def test_a_folder_under_a_llamas_names_loads_too(folder, tmp_path):
    """What `export` writes."""
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.config.save_pretrained(tmp_path)
    save_file(network.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again.lm_head.weight, network.lm_head.weight)


@pytest.mark.parametrize(
    ("key", "value"), [("block_type", "sequential"), ("alibi", True), ("include_qkv_bias", True), ("rope", False)]
)
def test_another_architecture_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"{key} differs.*GSAI-ML"):
        as_llama({**PUBLISHED, key: value})
