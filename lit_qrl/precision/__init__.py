"""Lightning precision plugins: in which arithmetic the learner computes."""

from lit_qrl.precision.base import QuantizedPrecision
from lit_qrl.precision.packed_lora import NVFP4LoRA, PackedLoRA
from lit_qrl.precision.qat import QATAligned
from lit_qrl.precision.unified_fp8 import UnifiedFP8

__all__ = ["NVFP4LoRA", "PackedLoRA", "QATAligned", "QuantizedPrecision", "UnifiedFP8"]
