"""A key-value cache in the numbers of FP8, whose scales are taken anew of what new weights make of the next prompts."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from lit_qrl.errors import ConfigError
from lit_qrl.formats.numerics import E4M3_MAX, round_e4m3
from lit_qrl.network.structure import body, cached
from lit_qrl.rollout.engine import SamplerSpec

CacheDtype = Literal["auto", "fp8"]
MARGIN = 2.0
"""How much larger than those that were seen a key or value may be, as in vLLM; FP8 is as exact at half its range."""
SEQUENCES = 8
"""Prompts that are looked at."""


class Rounding:
    """Rounds keys and values to E4M3, with one scale for the keys and one for the values of a layer.

    Args:
        scales: "layers 2", fp32, on the device of keys and values.

    >>> keys, values = Rounding(torch.tensor([[1.0, 0.5]]))(torch.tensor([17.0]), torch.tensor([0.3]), 0)
    >>> keys.tolist(), values.tolist()
    ([16.0], [0.3125])
    """

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales

    def __call__(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return what a cache of E4M3 numbers gives back of a layer's keys and values, in their dtype."""
        return _rounded(keys, self.scales[layer, 0]), _rounded(values, self.scales[layer, 1])


def _rounded(numbers: Tensor, scale: Tensor) -> Tensor:
    codes = round_e4m3((numbers.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX))
    return (codes * scale).to(numbers.dtype)


class RoundedCache(Cache):
    """A cache that keeps what `rounding` leaves of keys and values, or all of them where it is None."""

    rounding: Rounding | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new keys and values, and return all that the layer holds."""
        if self.rounding is not None:
            key_states, value_states = self.rounding(key_states, value_states, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class ScoringCache(RoundedCache, DynamicCache):
    """The cache of one forward pass over whole sequences."""

    def __init__(self, rounding: Rounding | None) -> None:
        super().__init__()
        self.rounding = rounding


class CacheScales:
    """The scales of an engine's cache.

    Args:
        dtype: of the cache: `auto` is the model's and has none, `fp8` is E4M3.
        margin: as `MARGIN`.

    Raises:
        ConfigError: for another dtype.
    """

    def __init__(self, dtype: CacheDtype, margin: float = MARGIN) -> None:
        if dtype not in ("auto", "fp8"):
            raise ConfigError("engine.kv_cache_dtype is unknown.", expected="auto or fp8", given=dtype)
        self.quantized, self.margin = dtype == "fp8", margin
        self._rounding: Rounding | None = None

    def check(self, spec: SamplerSpec, invariant: bool) -> None:
        """Raise `ConfigError` for what is not there beside rounded keys and values.

        Args:
            spec: of the run's sampler.
            invariant: `batch_invariant` is on.
        """
        for asked, name in (
            (invariant, "data.engine.batch_invariant"),
            (spec.in_flight != "none", "in-flight updates"),
        ):
            if self.quantized and asked:
                raise ConfigError(
                    f"An FP8 KV cache cannot be had beside {name}.",
                    expected="data.engine.kv_cache_dtype: auto",
                    given="fp8",
                    remedy="batch_invariant needs a learner that attends to the sampler's keys and values, and weights "
                    "in flight would change under scales of older ones. Leave one of the two out.",
                )

    def forget(self) -> None:
        """Take new scales before anything is drawn: the weights are others."""
        self._rounding = None

    def of(self, network: Any, sequences: Sequence[Sequence[int]], keep: bool = True) -> Rounding | None:
        """Return how keys and values are rounded; None where they are kept as they are.

        Args:
            network: the sampler's Hugging Face model.
            sequences: that are asked for; those of the first call after `forget` give the scales.
            keep: those scales are for later calls too.
        """
        if not self.quantized:
            return None
        rounding = self._rounding or Rounding(self._scales(network, sequences[:SEQUENCES]))
        if keep:
            self._rounding = rounding
        return rounding

    @torch.no_grad()
    def _scales(self, network: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Return the scales "layers 2" that hold the largest key and value of each layer, with the margin."""
        lengths = torch.tensor([len(one) for one in sequences])
        tokens = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
        for row, one in enumerate(sequences):
            tokens[row, : len(one)] = torch.tensor(one)
        device = network.get_input_embeddings().weight.device
        cache = ScoringCache(None)
        body(network)(input_ids=tokens.to(device), **cached(network, cache))
        # what stands behind a sequence's end is seen by nothing before it, and does not count
        filler = (torch.arange(tokens.shape[1]) >= lengths[:, None])[:, None, :, None].to(device)
        kept: list[tuple[Tensor, Tensor]] = [(layer.keys, layer.values) for layer in cache.layers]  # pyright: ignore
        found = [torch.stack([part.float().masked_fill(filler, 0).abs().amax() for part in pair]) for pair in kept]
        largest = torch.stack(found)
        return torch.where(largest > 0, largest, 1.0) * (self.margin / E4M3_MAX)
