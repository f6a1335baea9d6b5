"""Keys and values of a whole canvas, of which a forward renews the columns that it is given."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class CanvasLayer(CacheLayerMixin):
    """Keys and values of one layer: "rows heads columns dim".

    Args:
        cache: the cache that this layer belongs to; it holds the columns of the next forward.
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
        """Renew the columns `cache.at` and return those of the whole canvas, always in the same memory."""
        if not self.is_initialized:
            # of their own, since they may be parts of one product together with the queries
            self.keys, self.values, self.is_initialized = key_states.contiguous(), value_states.contiguous(), True
        elif self.cache.at is None:
            self.keys.copy_(key_states)
            self.values.copy_(value_states)
        else:
            self.keys.index_copy_(2, self.cache.at, key_states)
            self.values.index_copy_(2, self.cache.at, value_states)
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

    The first forward must be of the whole canvas; before a later one the caller sets `at`, the columns " n" that it
    is given, or None for all of them.

    Args:
        layers: number of layers.
        columns: of the canvas.
    """

    def __init__(self, layers: int, columns: int) -> None:
        self.columns = columns
        self.at: Tensor | None = None
        super().__init__(layers=[CanvasLayer(self) for _ in range(layers)])
