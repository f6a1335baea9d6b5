"""Which models the installed vLLM knows and this host can run, asked of vLLM itself, before any weight is loaded."""

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.structure import states
from lit_qrl.rollout.vllm.installation import installed_version

LONGEST = 400
"""Characters of vLLM's own words that are shown."""
CPU_BLOCK = 128
"""Tokens of a block of keys on a CPU, where chunked attention begins and ends with one."""
LATENT, DELTA = (512, 64), (128, 128)
"""Sizes of latent and of linear attention for which it has kernels."""

PAST_RELOAD = {"GptOssForCausalLM": "experts and attention sinks"}
"""Models whose loaders write some tensors into the parameters themselves, which a reload of vLLM's has emptied."""


WIDER_WINDOWS = {"Cohere2ForCausalLM": "CohereAttention"}
"""Models of whose attention vLLM may let a token see one key more than transformers does under the same config."""


def further_keys(name: str) -> int:
    """Return by how many keys vLLM's window of a model is wider than its config says.

    vLLM 0.32 takes Cohere 2's window w for the keys before a token, transformers for those with the token itself, as
    its masks do for every model.

    Args:
        name: of the model's class.
    """
    if name not in WIDER_WINDOWS:
        return 0
    attention = getattr(import_module(_class_of(name).__module__), WIDER_WINDOWS[name])
    return int("config.sliding_window + 1" in inspect.getsource(attention))


def latent(config: Any) -> bool:
    """Return True for a model with latent attention (MLA)."""
    return bool(getattr(config.get_text_config(), "kv_lora_rank", None))


def recurrent(name: str) -> bool:
    """Return True for a model that carries a state from token to token beside the keys and values, or instead."""
    from vllm.model_executor.models.interfaces import has_inner_state, is_hybrid

    kind = _class_of(name)
    return bool(is_hybrid(kind) or has_inner_state(kind))


def check_model(network: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Raise `ConfigError` for a model type that the installed vLLM lacks, cannot import, or has no CPU kernels for.

    Args:
        network: a Hugging Face model, whose weights need not be there.
        dtype: of the engine's activations, where it is known.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    name = type(network).__name__
    if name not in ModelRegistry.get_supported_archs():
        raise ConfigError(
            f"The installed vLLM does not know the model type {name}.",
            expected="an architecture of vLLM's list of supported models",
            given=name,
            remedy="Install a newer vLLM, or use TransformersEngine.",
        )
    try:
        _class_of(name)
    except (ImportError, RuntimeError, AttributeError, OSError) as error:  # absent, or built for another torch
        absent = getattr(error, "name", None) if isinstance(error, ImportError) else None
        raise ConfigError(
            f"vLLM knows the model type {name}, but cannot load it here: {str(error)[:LONGEST].rstrip('.')}.",
            expected="the packages that vLLM's own code of this model imports, built for the torch that is installed",
            given=f"no module {absent}" if absent else type(error).__name__,
            remedy=_or_embedded(network, f"Install {absent or 'what it names'}"),
        ) from error
    if name in PAST_RELOAD:
        raise ConfigError(
            f"vLLM's loader of {name} writes {PAST_RELOAD[name]} past vLLM's reload: no publish would reach them.",
            expected="a model whose loader vLLM can run again",
            given=name,
            remedy="Use TransformersEngine.",
        )
    config: Any = network.config
    _check_groups(name, config)
    if not torch.cuda.is_available():
        _check_kernels(network, dtype)


def refused_model(network: nn.Module, error: Exception) -> Exception:
    """Return what to raise where vLLM could not build its first engine; running out of memory stays what it is.

    Args:
        network: the learner's model.
        error: vLLM's.
    """
    kinds = (ValueError, KeyError, TypeError, AttributeError, AssertionError, NotImplementedError, ImportError)
    of_config = type(error).__module__.startswith("transformers.")  # which vLLM reads otherwise than this transformers
    if isinstance(error, ConfigError) or not (isinstance(error, kinds) or of_config):
        return error
    name, said = type(network).__name__, " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(
        f"vLLM does not build an engine of {name} with these arguments: {said[:LONGEST].rstrip('.')}.",
        expected="a model and data.engine arguments that the installed vLLM takes",
        remedy=_or_embedded(network, "Change what it names, take another version of vLLM"),
    )


def _or_embedded(network: nn.Module, remedy: str) -> str:
    """Return a remedy with the embedded engine as another, where that decodes the model."""
    return f"{remedy}." if states(network) else f"{remedy}, or use TransformersEngine."


def _class_of(name: str) -> Any:
    from vllm.model_executor.models.registry import ModelRegistry

    return ModelRegistry.models[name].load_model_cls()


def _check_groups(name: str, config: Any) -> None:
    """Raise `ConfigError` for a gated norm that vLLM computes group by group, and transformers over all channels."""
    groups = getattr(config, "n_groups", 1)
    if name == "Mamba2ForCausalLM" and groups > 1:
        raise ConfigError(
            f"vLLM normalizes each group of {name}'s channels alone, the learner (transformers) all of them together.",
            expected="n_groups: 1, of which both are the same",
            given=groups,
            remedy="Take a model with one group.",
        )


def _check_kernels(network: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise `ConfigError` for attention that the CPU build of vLLM has no kernel for; it would say so as it draws."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config: Any = network.config
    text, kinds = config.get_text_config(), getattr(config, "layer_types", None) or ()
    chunk = getattr(config, "attention_chunk_size", None) if "chunked_attention" in kinds else None
    compressed = (text.kv_lora_rank, text.qk_rope_head_dim) if latent(config) else LATENT
    linear = hasattr(text, "linear_key_head_dim")
    delta = (text.linear_key_head_dim, text.linear_value_head_dim) if linear else DELTA
    layers = [] if latent(config) else getattr(text, "per_layer_config", None) or [text]  # Gemma 4 has two sizes
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    odd = {_head_size(layer) for layer in layers} - {0, *sizes}
    state = linear or hasattr(text, "state_size") or hasattr(text, "mamba_d_state")
    scans = find_spec("vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm") is not None
    found = installed_version()
    packs_four = found is not None and found[0] < (0, 32) and torch.cpu._is_avx512_bf16_supported()
    for lacks, expected, given in (
        (chunk and chunk % CPU_BLOCK, f"an attention_chunk_size that is a multiple of {CPU_BLOCK}", chunk),
        (odd, f"a head size among {listed(map(str, sizes), 99)}", listed(map(str, odd))),
        (latent(config) and "CPU_MLA" not in AttentionBackendEnum.__members__, "vLLM 0.29", "one without MLA on a CPU"),
        (
            compressed != LATENT,
            "kv_lora_rank and qk_rope_head_dim as DeepSeek-V3 has, {} and {}".format(*LATENT),
            compressed,
        ),
        (
            delta != DELTA,
            "linear_key_head_dim and linear_value_head_dim as Qwen3-Next has, {} and {}".format(*DELTA),
            delta,
        ),
        (linear and dtype not in (None, torch.bfloat16), "data.engine.dtype: bf16", dtype),
        (state and not scans, "vLLM 0.29", "one without kernels of states on a CPU"),
        (packs_four and getattr(text, "conv_L_cache", 4) != 4, "vLLM 0.32", "one that packs convolutions of 4 alone"),
    ):
        if lacks:
            raise ConfigError(
                f"vLLM on CPU has no kernel for the attention of this {type(network).__name__}.",
                expected=expected,
                given=given,
                remedy=_or_embedded(network, "Use a GPU"),
            )


def _head_size(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
