"""An FP8 KV cache whose scales are too wide: a dial for its mismatch that leaves the policy as it is."""

from lit_qrl.rollout.embedded import TransformersEngine
from lit_qrl.rollout.embedded.cache import MARGIN


class WideCacheEngine(TransformersEngine):
    """The embedded engine with an FP8 KV cache, as if some key and some value were larger than all others.

    So does a cache without calibration: its scale is 1, whatever keys and values there are.

    Args:
        headroom: how many times as large. E4M3 has an exponent of its own for each number and loses nothing up to
            about 2¹⁰; beyond, numbers far below the largest have fewer digits, and then none.
    """

    def __init__(self, headroom: float = 1.0) -> None:
        super().__init__(kv_cache_dtype="fp8")
        self.cache_margin = headroom * MARGIN
