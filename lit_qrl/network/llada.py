"""LLaDA's checkpoints as a Llama with bidirectional attention: its config and names are mapped, its code is not run.

Importing this file makes transformers know the model type `llada`. The mapping follows the published
`configuration_llada.py` and `modeling_llada.py` (block type `llama`): in each block `ff_proj` is the gate, `up_proj`
what it multiplies, `ff_out` the way down; `transformer.ff_out` is the output head; rotary embeddings turn halves.
"""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from lit_qrl.errors import ConfigError

MODEL_TYPE = "llada"
SIZES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}
"""LLaDA's names of what a Llama has too."""
FIXED: dict[str, tuple[Any, ...]] = {
    "block_type": ("llama",),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "alibi": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "multi_query_attention": (False, None),
}
"""What a Llama computes, as LLaDA's config says it; another value is another model."""
NAMES = {
    r"model\.transformer\.blocks\.": "model.layers.",
    r"model\.transformer\.wte\.": "model.embed_tokens.",
    r"model\.transformer\.ln_f\.": "model.norm.",
    r"model\.transformer\.ff_out\.": "lm_head.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"(?<=\d)\.q_proj\.": ".self_attn.q_proj.",
    r"(?<=\d)\.k_proj\.": ".self_attn.k_proj.",
    r"(?<=\d)\.v_proj\.": ".self_attn.v_proj.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"\.ff_proj\.": ".mlp.gate_proj.",
    r"(?<=\d)\.up_proj\.": ".mlp.up_proj.",
    r"(?<=\d)\.ff_out\.": ".mlp.down_proj.",
}
"""From the names of LLaDA's tensors to a Llama's, in this order."""


class LLaDAConfig(LlamaConfig):
    """A Llama's config without causal attention; `from_dict` reads LLaDA's own keys too.

    >>> config = LLaDAConfig.from_dict({"d_model": 64, "n_heads": 4, "n_layers": 2, "mlp_hidden_size": 96})
    >>> config.hidden_size, config.num_key_value_heads, config.is_causal, config.mask_token_id
    (64, 4, False, None)
    """

    model_type = MODEL_TYPE
    is_causal: bool = False
    mask_token_id: int | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of LLaDA's own keys, or of a Llama's.

        Raises:
            ConfigError: for a variant of LLaDA that is no Llama.
        """
        return super().from_dict(as_llama(config_dict) if "d_model" in config_dict else config_dict, **kwargs)


class LLaDAForMaskedDiffusion(LlamaForCausalLM):
    """The Llama of transformers under LLaDA's config, whose attention is bidirectional."""

    config: LLaDAConfig  # pyright: ignore[reportIncompatibleVariableOverride]


def as_llama(published: dict[str, Any]) -> dict[str, Any]:
    """Return a Llama's config from the keys of LLaDA's.

    Args:
        published: content of a LLaDA checkpoint's `config.json`.

    Raises:
        ConfigError: where it describes another architecture than a Llama's.
    """
    for key, accepted in FIXED.items():
        if published.get(key, accepted[0]) not in accepted:
            raise ConfigError(
                f"This variant of LLaDA is no Llama: {key} differs.",
                expected=" or ".join(str(one) for one in accepted),
                given=published[key],
                remedy="Take a checkpoint of the layout of GSAI-ML/LLaDA-8B-Instruct.",
            )
    ours = {name: published[key] for key, name in SIZES.items() if published.get(key) is not None}
    if "intermediate_size" not in ours:
        ours["intermediate_size"] = int(published.get("mlp_ratio", 4) * published["d_model"])
    ours["vocab_size"] = published.get("embedding_size") or published.get("vocab_size", 126464)
    ours["rope_parameters"] = {"rope_type": "default", "rope_theta": float(published.get("rope_theta", 10000.0))}
    kept = ("rms_norm_eps", "mask_token_id", "pad_token_id", "eos_token_id", "bos_token_id", "dtype", "torch_dtype")
    ours |= {key: published[key] for key in kept if key in published}
    return {"rms_norm_eps": 1e-5, "bos_token_id": None, **ours, "model_type": MODEL_TYPE, "is_causal": False}


AutoConfig.register(MODEL_TYPE, LLaDAConfig, exist_ok=True)
AutoModelForCausalLM.register(LLaDAConfig, LLaDAForMaskedDiffusion, exist_ok=True)
register_checkpoint_conversion_mapping(
    MODEL_TYPE, [WeightRenaming(old, new) for old, new in NAMES.items()], overwrite=True
)
