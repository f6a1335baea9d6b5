"""A model folder in another number format, offline, with activation-aware scaling where asked for."""
