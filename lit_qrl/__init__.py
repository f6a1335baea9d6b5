"""Quantized reinforcement learning of language models on the Lightning Trainer."""

import logging

from lit_qrl.aliases import install

__version__ = "0.1.0"

# What bitsandbytes says at import is of a kernel that only its own 4-bit layers would use.
logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)

install()
