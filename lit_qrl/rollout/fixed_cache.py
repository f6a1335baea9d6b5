"""A layer of a key-value cache whose columns are allocated once and all seen by every forward."""

from typing import Any

from transformers.cache_utils import CacheLayerMixin


class FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, "rows heads columns dim"; a subclass says which of them a forward writes.

    Args:
        cache: the cache that this layer belongs to, with its number of `columns`; it says what the next forward writes.
    """

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, cache: Any) -> None:
        super().__init__()
        self.cache = cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that a forward sees: all columns."""
        return self.cache.columns, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are given, and no column lies before those that are seen."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of columns."""
        return self.cache.columns
