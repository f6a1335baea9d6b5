"""What is known of model families: how they name their layers, which of them belong together, and their limits.

Another family, or experts, whose layers are named or built otherwise, is a matter of these tables.
"""

import copy
import inspect
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_qrl.errors import ConfigError

EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {"Llama4TextExperts": {"is_transposed": True}}
"""Classes of stacked experts that do not say how they lie, and what they would say in transformers' words."""
FUSED_LAYERS = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
"""Linear layers, by the last part of their names, and the one layer that engines hold and multiply them as. A test
holds it to what vLLM's models say that they pack; where vLLM holds others as one, `check_groups`
(`rollout/vllm/checks.py`) says so."""
RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Classes whose forward pass is weight · (x · rsqrt(mean x² + ε)), rounded before the product."""
ROTATED_BY_HALVES = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
"""Classes whose queries and keys become x cos + (−second half, first half) sin, by their module's function for it."""
PLAIN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes of decoder layers that are h' = h + attention(norm(h)), then h' + mlp(norm(h')), in the names of
`NORM_READERS`."""
NORM_READERS = {"input_layernorm": "self_attn.q_proj", "post_attention_layernorm": "mlp.gate_proj"}
"""Norms of a decoder layer, and a linear layer that reads the output."""
FINAL_NORM = "norm"
SILU = ("SiLU", "SiLUActivation")
"""Classes of activations that are x · sigmoid(x)."""
HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of each head's queries and keys, in an attention."""
GATED_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})
"""The parts of an MLP that is down(act(gate(x)) · up(x))."""
MASKS_SCORES = frozenset({"group_limited_greedy"})
"""Values of a router's `topk_method` with which an expert outside of the chosen groups has no score of its own left."""
PLAIN_ATTENTION = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "granite", "olmo2"})
"""Model types whose attention is softmax(q·kᵀ·scaling)·v over the whole past, by way of the library's registry."""
ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""What transformers calls layers that remember keys and values alone."""
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""What a forward pass calls the keys and values that it is given: transformers from 5.24 on, and before."""
WITHOUT_SOFTCAP = ("sdpa", "paged|sdpa")
"""Attentions that leave out a soft-cap of the scores, without a word."""


def text_part(root: nn.Module) -> nn.Module:
    """Return the text decoder of a Hugging Face model, without head, image and audio parts; any other module itself."""
    found = root.get_decoder() if isinstance(root, PreTrainedModel) else None
    return root if found is None else body(found)


def body(network: Any) -> Any:
    """Return the part of a causal language model that yields hidden states: all but its head.

    Args:
        network: a Hugging Face model.
    """
    base = getattr(network, "base_model", network)
    if base is not network:
        return base
    inside = [part for part in network.children() if isinstance(part, PreTrainedModel)]
    return inside[0] if inside and network.get_output_embeddings() is not None else network


def cached(network: Any, cache: Any) -> dict[str, Any]:
    """Return the arguments with which a model reads and fills a cache, by the name that its forward pass has for it.

    Args:
        network: a Hugging Face model.
        cache: of keys and values; None for none.
    """
    return {"use_cache": False} if cache is None else {_cache_argument(type(network)): cache, "use_cache": True}


@lru_cache
def _cache_argument(model: type[nn.Module]) -> str:
    new, old = CACHE_ARGUMENTS
    return new if new in inspect.signature(model.forward).parameters else old


def outline(config: Any, **options: Any) -> Any:
    """Return the causal language model that a config describes, without memory for its weights.

    Args:
        config: of a Hugging Face model.
        **options: of `AutoModelForCausalLM.from_config`.

    >>> from transformers import LlamaConfig
    >>> outline(LlamaConfig(num_hidden_layers=1)).lm_head.weight.device.type
    'meta'
    """
    with init_empty_weights(include_buffers=False):
        network = AutoModelForCausalLM.from_config(config, **options)
    network.tie_weights()  # what was tied inside is two parameters now
    return network.eval()


def outline_of(policy: Any) -> Any:
    """Return a policy's model, with the weights if they are loaded and else without memory for them."""
    if policy.model is not None:
        return policy.network
    return outline(copy.deepcopy(policy.config), trust_remote_code=policy._hub["trust_remote_code"])


def decoder_layers(network: Any) -> tuple[str, nn.ModuleList]:
    """Return name and list of the model's decoder layers.

    Raises:
        ConfigError: when there is no such list.
    """
    count = network.config.get_text_config().num_hidden_layers
    for name, module in network.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ConfigError(
        f"{type(network).__name__} has no list of {count} decoder layers.",
        expected="a decoder such as Llama's or Qwen's",
        remedy="Quantize it elsewhere, or on load.",
    )


def states(network: Any) -> list[str]:
    """Return what a model carries from token to token beside keys and values; its weights need not be there.

    >>> from transformers import LlamaConfig, Mamba2Config
    >>> states(outline(LlamaConfig())), states(outline(Mamba2Config()))
    ([], ['linear_attention'])
    """
    kinds = set(getattr(network.config.get_text_config(), "layer_types", None) or ())
    recurrent = ["a recurrent state"] * bool(getattr(network, "_is_stateful", False))
    return sorted(kinds - set(ATTENTION_KINDS)) or recurrent


def computed_buffers(network: nn.Module, beside_weights: bool) -> dict[str, Tensor]:
    """Return the buffers that a model computed when it was built, and that no checkpoint has, by name.

    Frequencies of rotary embeddings that follow the length of what is computed are no constants, and are left out.

    Args:
        network: of any library.
        beside_weights: those of modules with parameters too, which may be made of them.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    >>> list(computed_buffers(LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape)), True))
    ['model.rotary_emb.inv_freq', 'model.rotary_emb.original_inv_freq']
    """
    found = {}
    for prefix, module in network.named_modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        follows = any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)
        for name in module._non_persistent_buffers_set if beside_weights or not module._parameters else ():
            if follows and name.endswith("inv_freq") and "original" not in name:
                continue
            if (buffer := module._buffers.get(name)) is not None:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return dict(sorted(found.items()))


def compute_frequencies_on_the_cpu(network: nn.Module) -> None:
    """Give rotary embeddings the frequencies that a CPU computes, wherever the model was built.

    A GPU's power function may differ in the last bit. Then an angle rounds otherwise at some position in hundreds, and
    from that token on learner and sampler, whose frequencies are a CPU's, no longer agree to the last bit.

    Args:
        network: a Hugging Face model; what is on the meta device stays there.
    """
    for part in network.modules():
        buffers = dict(part.named_buffers(recurse=False))
        if any(name.endswith("inv_freq") for name in buffers) and hasattr(part, "config"):
            with torch.device("cpu"):
                kind: Any = type(part)
                fresh = dict(kind(part.config).named_buffers(recurse=False))
            for name, buffer in buffers.items():
                if not buffer.is_meta:
                    buffer.copy_(fresh[name])


def cached_numbers(config: Any) -> int:
    """Return how many numbers of keys and values one token leaves in all layers.

    Args:
        config: of a Hugging Face model; its layers may differ in their heads.

    >>> from transformers import LlamaConfig
    >>> cached_numbers(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=8))
    32
    """
    text = config.get_text_config()
    count = text.num_hidden_layers
    layers = [text.per_layer_config[i] for i in range(count)] if getattr(text, "per_layer_config", None) else [text]
    total = 0
    for layer in layers:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        key = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        value = key
        if getattr(layer, "kv_lora_rank", None):
            key, value = layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
        total += heads * (key + value)
    return total * (count // len(layers))


def check_positions(config: Any, prompt: int, drawn: int, remedy: str) -> None:
    """Raise `ConfigError` when a model has not as many positions as a prompt and its completion take.

    Args:
        config: the model's.
        prompt: tokens of the longest prompt.
        drawn: tokens of the longest completion.
        remedy: which settings to lower.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt + drawn > positions:
        raise ConfigError(
            "The model cannot hold the longest sequence.",
            expected=f"at most {positions} positions",
            given=f"a prompt of {prompt} tokens and up to {drawn} drawn ones",
            remedy=remedy,
        )


def check_tokens(config: Any, prompts: Iterable[Sequence[int]]) -> None:
    """Raise `ConfigError` for a prompt with a token that the model has no embedding of.

    Args:
        config: the model's.
        prompts: token ids.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    for number, prompt in enumerate(prompts):
        if size is not None and len(prompt) and not 0 <= min(prompt) <= max(prompt) < size:
            odd = next(token for token in prompt if not 0 <= token < size)
            raise ConfigError(
                f"Prompt {number} holds a token that the model has no embedding of.",
                expected=f"token ids from 0 to {size - 1}",
                given=odd,
                remedy="Tokenizer and model do not belong together: set model.policy.tokenizer to the model's own, or "
                "resize the model's embedding to the tokenizer first.",
            )


def implementation(config: Any, asked: str | None = None) -> str | None:
    """Return the attention implementation for a model; None is the library's choice.

    Args:
        config: the model's.
        asked: by the user, or None.

    Raises:
        ConfigError: for one that leaves out the soft-cap c · tanh(scores / c) of the model's attention.

    >>> from transformers import Gemma2Config, LlamaConfig
    >>> implementation(Gemma2Config()), implementation(LlamaConfig())
    ('eager', None)
    """
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if not softcap:
        return asked
    if asked in WITHOUT_SOFTCAP:
        raise ConfigError(
            "This attention leaves out the soft-cap of the model's scores, so that another model would be trained.",
            expected="eager or flash_attention_2",
            given=f"model.policy.attn_implementation: {asked}, for a cap of {softcap}",
            remedy="Leave model.policy.attn_implementation out.",
        )
    return asked or "eager"
