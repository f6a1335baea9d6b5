"""Which models the installed vLLM knows and this host can run, asked of vLLM itself, before any weight is loaded."""

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.structure import states

LONGEST = 400
"""Characters of vLLM's own words that are shown."""
CPU_BLOCK = 128
"""Tokens of a block of keys on a CPU, where chunked attention begins and ends with one."""
DELTA_HEAD = 128
"""Numbers of a head of linear attention for which vLLM's CPU build is known to have kernels; of 32 it has none."""

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
        _check_latent(name, config)
        _check_chunks(config)
        check_head_size(config)
        _check_linear(name, config, dtype)


def refused_model(network: nn.Module, error: Exception) -> Exception:
    """Return what to raise where vLLM could not build its first engine; running out of memory stays what it is.

    Args:
        network: the learner's model.
        error: vLLM's.
    """
    if isinstance(error, ConfigError) or not isinstance(
        error, (ValueError, KeyError, TypeError, AttributeError, AssertionError, NotImplementedError, ImportError)
    ):
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


def _check_chunks(config: Any) -> None:
    """Raise `ConfigError` for chunks of attention that end inside a block of keys as vLLM holds them on a CPU."""
    size = getattr(config, "attention_chunk_size", None)
    if size and size % CPU_BLOCK and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            f"vLLM on CPU holds keys in blocks of {CPU_BLOCK} tokens, and chunks of this model's attention end in one.",
            expected=f"an attention_chunk_size that is a multiple of {CPU_BLOCK}",
            given=size,
            remedy="Use TransformersEngine, or a GPU.",
        )


def _check_latent(name: str, config: Any) -> None:
    registry = import_module("vllm.v1.attention.backends.registry")
    if latent(config) and "CPU_MLA" not in registry.AttentionBackendEnum.__members__:
        raise ConfigError(
            f"The CPU build of this vLLM has no latent attention (MLA), which {name} needs.",
            expected="vLLM 0.32, or a GPU",
            remedy="Install it, or use TransformersEngine.",
        )
    text = config.get_text_config()
    if latent(config) and not _attends_latently(text.kv_lora_rank, text.qk_rope_head_dim):
        raise ConfigError(
            "vLLM on CPU has no latent attention of this model's size.",
            expected="kv_lora_rank 512 and qk_rope_head_dim 64, as DeepSeek-V3 has",
            given=f"{text.kv_lora_rank} and {text.qk_rope_head_dim}",
            remedy="Use TransformersEngine, or a GPU.",
        )


def _check_linear(name: str, config: Any, dtype: torch.dtype | None) -> None:
    """Raise `ConfigError` for what vLLM's CPU kernels of linear attention (gated delta rule) do not take."""
    text = config.get_text_config()
    size = getattr(text, "linear_key_head_dim", None)
    if size is None:
        return
    if size != DELTA_HEAD or text.linear_value_head_dim != DELTA_HEAD:
        raise ConfigError(
            f"vLLM on CPU has no kernel for the linear attention of {name} at this size.",
            expected=f"linear_key_head_dim and linear_value_head_dim {DELTA_HEAD}, as Qwen3-Next has",
            given=f"{size} and {text.linear_value_head_dim}",
            remedy="Use a GPU.",
        )
    if dtype not in (None, torch.bfloat16):
        raise ConfigError(
            f"vLLM on CPU computes the linear attention of {name} in bf16 alone.",
            expected="data.engine.dtype: bf16",
            given=str(dtype).removeprefix("torch."),
            remedy="Set it, or use a GPU.",
        )


def _attends_latently(latent_size: int, rotated: int) -> bool:
    """Return True where vLLM's kernel takes keys of that size."""
    import vllm._custom_ops as ops

    width, block = latent_size + rotated, 16
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    try:
        keys = torch.zeros(1, block, width)
        ops.mla_decode_kvcache_cpu(torch.empty(1, 1, latent_size), torch.zeros(1, 1, width), keys, 1.0, table, length)
    except (AttributeError, RuntimeError):
        return False
    return True


def check_head_size(config: Any) -> None:
    """Raise `ConfigError` for a size of attention heads that vLLM's CPU attention has no kernel for."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = config.get_text_config()
    if getattr(config, "kv_lora_rank", None):  # latent attention, which has a backend of its own
        return
    layers = getattr(config, "per_layer_config", None) or [config]  # of Gemma 4, whose layers have two sizes
    for size in sorted({_head_size(layer) for layer in layers} - {0}):
        if not CPUAttentionBackend.supports_head_size(size) and not _attends(size):
            raise ConfigError(
                "vLLM on CPU has no attention kernel for the size of this model's heads.",
                expected=f"a head size among {listed(map(str, CPUAttentionBackend.get_supported_head_sizes()), 99)}",
                given=size,
                remedy="Use TransformersEngine, or a GPU.",
            )


def _head_size(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)


def _attends(size: int) -> bool:
    """Return True for a head size that the kernel knows and vLLM's list does not, such as 48 in 0.32."""
    import vllm._custom_ops as ops

    ends = torch.tensor([0, 1], dtype=torch.int32)
    try:
        ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=size,
            seq_lens=ends[1:],
            dtype=torch.float32,
            query_start_loc=ends,
            causal=True,
            sliding_window_size=-1,
            isa="vec16",
            enable_kv_split=True,
        )
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True
