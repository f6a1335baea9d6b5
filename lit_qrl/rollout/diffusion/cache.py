"""Keys and values of a whole canvas, of which a forward renews the columns that it is given."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class CanvasLayer(CacheLayerMixin):
    """Keys and values of one layer: "rows heads columns dim".

    Args:
        cache: the cache that this layer belongs to; it holds the first column of the next forward.
    """

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, cache: "CanvasCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated: the first forward brings all columns."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Renew the columns from `cache.first` on and return those of the whole canvas."""
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            part = slice(self.cache.first, self.cache.first + key_states.shape[2])
            self.keys[:, :, part] = key_states
            self.values[:, :, part] = value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that the next forward sees: the whole canvas."""
        return self.cache.columns, 0

    def get_seq_length(self) -> int:
        """Return 0: no column lies before the canvas."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of columns."""
        return self.cache.columns


class CanvasCache(Cache):
    """Keys and values of all layers, in the form that Hugging Face models take.

    The first forward must be of the whole canvas; before a later one of some columns the caller sets `first`.

    Args:
        layers: number of layers.
        columns: of the canvas.
    """

    def __init__(self, layers: int, columns: int) -> None:
        self.columns, self.first = columns, 0
        super().__init__(layers=[CanvasLayer(self) for _ in range(layers)])
