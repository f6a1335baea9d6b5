"""Lightning precision plugins and the number formats behind them."""

from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.precision.packed_lora import NVFP4LoRA
from lit_qrl.precision.qat import QATAligned
from lit_qrl.precision.unified_fp8 import UnifiedFP8

__all__ = ["NVFP4LoRA", "QATAligned", "QuantizedPrecision", "UnifiedFP8"]
