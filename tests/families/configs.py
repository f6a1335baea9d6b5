"""Every family of the table in docs/models.md, at the smallest size that all formats fit, and a folder of each.

`python -m tests.families.configs qwen3 /tmp/qwen3` writes such a folder, with random weights and a tokenizer.
"""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.networks import WORDS, build_tokenizer

HIDDEN, INNER, HEADS, HEAD_DIM = 128, 256, 4, 32
"""Inputs of every linear layer are a multiple of 128, the group of INT4 and the block of FP8."""
COMMON = {
    "vocab_size": len(WORDS),
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
}


@dataclass(frozen=True)
class Family:
    """One family of models.

    Args:
        name: in the table.
        model_type: of transformers.
        hub: a model of this family on the hub, for a newcomer's command.
        options: of its config, beside `COMMON`.
        drop: options of `COMMON` that it has under another name, or not at all.
        text: options of the text part's config, for a family whose config has parts; the rest are the wrapper's.
        kind: `dense`, `experts`, `state` (a recurrent or convolutional part) or `multimodal`.
    """

    name: str
    model_type: str
    hub: str
    options: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    text: dict[str, Any] | None = None
    kind: str = "dense"

    @property
    def vllm(self) -> str:
        """The architecture by which vLLM 0.32 knows it: that of transformers."""
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type]

    def config(self) -> Any:
        """Return the config of the tiny model."""
        common = {key: value for key, value in COMMON.items() if key not in self.drop}
        if self.text is None:
            return AutoConfig.for_model(self.model_type, **{**common, **self.options})
        return AutoConfig.for_model(self.model_type, text_config={**common, **self.text}, **self.options)


_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_NO_GROUPS = ("num_key_value_heads", "head_dim")
_GPT2 = (*_NO_GROUPS, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_GPT2 += ("max_position_embeddings",)
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_WINDOW = {"sliding_window": 8}
_BOTH = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_SCALED = {"query_pre_attn_scalar": 32}
_ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0}

FAMILIES: tuple[Family, ...] = (
    Family("Llama 3", "llama", "meta-llama/Llama-3.2-1B-Instruct", {"rope_parameters": _LLAMA3}),
    Family("Qwen2.5", "qwen2", "Qwen/Qwen2.5-0.5B-Instruct", drop=("head_dim",)),
    Family("Qwen3", "qwen3", "Qwen/Qwen3-0.6B", {"tie_word_embeddings": True}),
    Family("Mistral", "mistral", "mistralai/Mistral-7B-Instruct-v0.1", _WINDOW),
    Family("Gemma 2", "gemma2", "google/gemma-2-2b-it", {**_WINDOW, **_SCALED}),
    Family("Gemma 3", "gemma3_text", "google/gemma-3-1b-it", {**_BOTH, **_SCALED}),
    Family(
        "Gemma 3 multimodal",
        "gemma3",
        "google/gemma-3-4b-it",
        {
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "boi_token_index": 18,
            "eoi_token_index": 19,
            "image_token_index": 20,
        },
        text={**_BOTH, **_SCALED},
        kind="multimodal",
    ),
    Family(
        "Gemma 4",
        "gemma4_text",
        "google/gemma-4-E2B-it",
        {**_BOTH, "vocab_size_per_layer_input": len(WORDS), "hidden_size_per_layer_input": 0, "global_head_dim": 64},
    ),
    Family("Phi-3", "phi3", "microsoft/Phi-3-mini-4k-instruct", drop=("head_dim",)),
    Family("phi-2", "phi", "microsoft/phi-2", drop=("head_dim",)),
    Family("GLM-4", "glm4", "zai-org/GLM-4-9B-0414"),
    Family("OLMo 2", "olmo2", "allenai/OLMo-2-0425-1B-Instruct", drop=("head_dim",)),
    Family("OLMo 3", "olmo3", "allenai/Olmo-3-7B-Instruct", _BOTH, drop=("head_dim",)),
    Family("SmolLM3", "smollm3", "HuggingFaceTB/SmolLM3-3B", {"no_rope_layer_interval": 2}, ("head_dim",)),
    Family(
        "Granite",
        "granite",
        "ibm-granite/granite-3.3-2b-instruct",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.1},
        ("head_dim",),
    ),
    Family("Cohere 2", "cohere2", "CohereLabs/c4ai-command-r7b-12-2024", {**_WINDOW, "logit_scale": 0.25}),
    Family("StarCoder 2", "starcoder2", "bigcode/starcoder2-3b", _WINDOW, ("head_dim",)),
    Family("GPT-NeoX", "gpt_neox", "EleutherAI/pythia-160m", drop=_NO_GROUPS),
    Family(
        "GPT-2",
        "gpt2",
        "openai-community/gpt2",
        {"n_embd": HIDDEN, "n_inner": INNER, "n_layer": 2, "n_head": HEADS, "n_positions": 256},
        _GPT2,
    ),
    Family(
        "OPT",
        "opt",
        "facebook/opt-125m",
        {"ffn_dim": INNER, "word_embed_proj_dim": HIDDEN},
        (*_NO_GROUPS, "intermediate_size"),
    ),
    Family(
        "Falcon",
        "falcon",
        "tiiuae/falcon-7b-instruct",
        {"ffn_hidden_size": 4 * HIDDEN},  # vLLM builds no other for this family
        (*_NO_GROUPS, "intermediate_size"),
    ),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        "deepseek-ai/DeepSeek-V3",
        {
            **_ROUTED,
            "num_key_value_heads": HEADS,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": HEAD_DIM,
            "qk_rope_head_dim": 16,
            "v_head_dim": HEAD_DIM,
        },
        ("head_dim",),
        kind="experts",
    ),
    Family("GLM-4-MoE", "glm4_moe", "zai-org/GLM-4.5-Air", _ROUTED, kind="experts"),
    Family(
        "gpt-oss",
        "gpt_oss",
        "openai/gpt-oss-20b",
        {
            **_BOTH,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _YARN,  # vLLM builds no other for this family
        },
        kind="experts",
    ),
    Family(
        "Mixtral",
        "mixtral",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        kind="experts",
    ),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen/Qwen3-30B-A3B", {**EXPERTS, "num_experts": 4}, kind="experts"),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {**EXPERTS, **GATED_DELTA, "num_experts": 4, "shared_expert_intermediate_size": 128},
        kind="state",
    ),
    Family("Qwen3.5", "qwen3_5_text", "Qwen/Qwen3.5-0.8B", GATED_DELTA, kind="state"),
    Family(
        "Llama 4",
        "llama4_text",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": INNER, "attention_chunk_size": 16},
        kind="experts",
    ),
    Family(
        "LFM2",
        "lfm2",
        "LiquidAI/LFM2-1.2B",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 128, "block_dim": HIDDEN, "conv_dim": HIDDEN},
        ("head_dim",),
        kind="state",
    ),
    Family(
        "Falcon-H1",
        "falcon_h1",
        "tiiuae/Falcon-H1-0.5B-Instruct",
        {"mamba_d_ssm": HIDDEN, "mamba_n_heads": 4, "mamba_d_head": HEAD_DIM, "mamba_d_state": 16},
        ("head_dim",),
        kind="state",
    ),
    Family(
        "Mamba 2",
        "mamba2",
        "state-spaces/mamba2-130m",
        {"num_heads": 8, "head_dim": HEAD_DIM, "state_size": 16, "n_groups": 1},
        ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"),
        kind="state",
    ),
)
"""The rows of the table."""
BY_TYPE = {family.model_type: family for family in FAMILIES}


SIZES = {
    "kv_lora_rank": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "linear_key_head_dim": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
"""The sizes for which vLLM's CPU build has kernels of latent and of linear attention, by an option that tells which."""


def sized(family: Family) -> Family:
    """Return the family at a size that vLLM's CPU build has kernels for."""
    changes = next((sizes for key, sizes in SIZES.items() if key in family.options), {})
    return replace(family, options={**family.options, **changes})


def absent() -> list[str]:
    """Return the names of the families that the installed transformers does not have."""
    return [family.name for family in FAMILIES if family.model_type not in CONFIG_MAPPING_NAMES]


def random_network(family: Family, seed: int = 0, dtype: torch.dtype = torch.float32, gain: float = 4.0) -> Any:
    """Return a model of that family with random weights; two seeds are two models far apart.

    Args:
        family: which.
        seed: of the weights.
        dtype: of the weights.
        gain: matrices are scaled by it, norms and biases moved away from 1 and 0, so that no part is without effect.
    """
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(family.config(), dtype=dtype)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(gain)
    return network.eval()


def model_folder(family: Family, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> str:
    """Write the family's model and the character tokenizer into `folder` where they are not there yet; return it."""
    if not (folder / "config.json").exists():
        random_network(family, seed, dtype).save_pretrained(folder)
        build_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", choices=sorted(BY_TYPE), metavar="model_type")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(model_folder(sized(BY_TYPE[arguments.model_type]), arguments.folder))
