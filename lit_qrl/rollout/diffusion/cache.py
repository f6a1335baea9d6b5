"""Keys and values of a whole canvas, of which a forward renews the columns that it is given."""

from torch import Tensor
from transformers.cache_utils import Cache

from lit_qrl.network.autocast import autocast_input
from lit_qrl.rollout.fixed_cache import FixedLayer


class CanvasLayer(FixedLayer):
    """Keys and values of one layer: "rows heads columns dim"; the cache holds the columns of the next forward."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated: the first forward brings all columns."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Renew the columns `cache.at` and return those of the whole canvas, always in the same memory."""
        key_states, value_states = autocast_input(key_states), autocast_input(value_states)
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
