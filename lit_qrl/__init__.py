"""Quantized reinforcement learning of language models on the Lightning Trainer."""

import logging
from typing import TYPE_CHECKING

from lit_qrl.aliases import OFFERED, install, offering

if TYPE_CHECKING:
    from lit_qrl.callbacks.defaults import default_callbacks
    from lit_qrl.data.module import RolloutDataModule
    from lit_qrl.module import GRPOModule
    from lit_qrl.policy import CausalPolicy
    from lit_qrl.run.folder import resume_from

__all__ = ["CausalPolicy", "GRPOModule", "RolloutDataModule", "default_callbacks", "resume_from"]
__version__ = "0.1.0"

# What bitsandbytes says at import is of a kernel that only its own 4-bit layers would use.
logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)

install()

# They load torch and Lightning.
__getattr__ = offering(__name__, OFFERED)
