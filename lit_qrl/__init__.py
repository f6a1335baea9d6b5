"""Quantized reinforcement learning of language models on the Lightning Trainer."""

__version__ = "0.1.0"
