"""Scales of an FP8 KV cache: taken anew of the keys and values that new weights make of the next prompts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError

LARGEST = {"fp8": 448.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""By the name of the cache's dtype, its largest number."""
MARGIN = 2.0
"""How much larger than those that were seen a key or value may be; numbers of FP8 are as exact at half the range."""
SEQUENCES = 8
"""Prompts that are looked at."""


def quantized(kv_cache_dtype: str) -> bool:
    """Return whether a KV cache has scales.

    >>> quantized("fp8"), quantized("auto")
    (True, False)
    """
    return kv_cache_dtype in LARGEST


def check_host(kv_cache_dtype: str) -> None:
    """Raise `ConfigError` for a cache that the CPU build of vLLM cannot keep on this host."""
    if not quantized(kv_cache_dtype) or torch.cuda.is_available():
        return
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        raise ConfigError(
            "The CPU build of vLLM keeps no FP8 KV cache on this CPU.",
            expected="a CPU with AVX-512 or AMX, or a GPU",
            given=f"{torch.backends.cpu.get_cpu_capability()}, data.engine.kv_cache_dtype: {kv_cache_dtype}",
            remedy="Set data.engine.kv_cache_dtype to auto.",
        )


def attentions(model: nn.Module) -> dict[str, Any]:
    """Return vLLM's attention modules with a cache of keys and values, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale") and hasattr(module, "impl")
    }


def check_scales(model: nn.Module) -> None:
    """Raise `ConfigError` for a model whose attention keeps something else than keys and values."""
    found = attentions(model)
    others = [
        name
        for name, module in found.items()
        if hasattr(module, "kv_lora_rank") or getattr(module, "kv_sharing_target_layer_name", None)
    ]
    if others or not found:
        raise ConfigError(
            "The scales of an FP8 KV cache cannot be calibrated for this model.",
            expected="attention that keeps keys and values of its own",
            given=f"latent attention, or another layer's cache, in {others[0]}" if others else "none that was found",
            remedy="Set data.engine.kv_cache_dtype to auto.",
        )


@contextmanager
def observed(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give the largest magnitudes " 2" of keys and values that each attention sees inside, by its name.

    Of a batch that is padded to the size of a CUDA graph the rows behind its tokens are left out: they hold anything.
    """
    seen: dict[str, Tensor] = {}
    originals: dict[str, Callable[..., Any]] = {}
    found = attentions(model)

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            count = _tokens(*args, **kwargs)
            if key is not None and value is not None and count != 0:
                now = torch.stack([part.detach()[:count].abs().amax() for part in (key, value)]).float()
                seen[name] = torch.maximum(seen[name], now) if name in seen else now
            return original(layer, query, key, value, *args, **kwargs)

        return forward

    for name, module in found.items():
        originals[name] = module.impl.forward
        module.impl.forward = watched(name, originals[name])
    try:
        yield seen
    finally:
        for module in found.values():
            del module.impl.forward


def _tokens(kv_cache: Any = None, attn_metadata: Any = None, *_: Any, **__: Any) -> int | None:
    """Return how many rows of a forward pass are tokens, as vLLM tells its attention; None where it does not."""
    return getattr(attn_metadata, "num_actual_tokens", None)


def set_scales(model: nn.Module, largest: Mapping[str, Tensor], kv_cache_dtype: str) -> dict[str, tuple[float, float]]:
    """Set the scales of every attention's keys and values, where kernels and CUDA graphs read them, and return them.

    Args:
        model: vLLM's.
        largest: magnitudes " 2" by name, as `observed` gives them.
        kv_cache_dtype: of the cache.

    Raises:
        RuntimeError: an attention was not seen, or what it holds afterwards is not what was set.
    """
    found = attentions(model)
    missing = sorted(found.keys() - largest.keys())
    if missing:
        raise RuntimeError(f"No keys and values of {missing[0]} were seen, so that its cache has no scale.")
    scales: dict[str, tuple[float, float]] = {}
    for name, module in found.items():
        seen = torch.where(largest[name] > 0, largest[name], 1.0) * (MARGIN / LARGEST[kv_cache_dtype])
        for kind, scale in zip("kv", seen.tolist(), strict=True):
            getattr(module, f"_{kind}_scale").fill_(scale)
            setattr(module, f"_{kind}_scale_float", scale)
            if hasattr(module, f"_{kind}_scale_cpu"):
                getattr(module, f"_{kind}_scale_cpu").fill_(scale)
        scales[name] = (float(seen[0]), float(seen[1]))
    held = read_scales(model)
    wrong = [name for name, (key, value) in scales.items() if not torch.allclose(
        torch.tensor([key, value]), torch.tensor(held[name]), rtol=1e-6, atol=0
    )]  # fmt: skip
    if wrong:
        raise RuntimeError(f"The cache of {wrong[0]} has scales {held[wrong[0]]} where {scales[wrong[0]]} were set.")
    return scales


def read_scales(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return the scales of keys and values by the name of their attention, as its kernels read them."""
    return {name: (float(one._k_scale), float(one._v_scale)) for name, one in attentions(model).items()}
