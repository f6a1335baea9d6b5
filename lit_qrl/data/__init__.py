"""Prompts in, scored rollouts out."""
