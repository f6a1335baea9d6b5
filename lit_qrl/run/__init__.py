"""A run folder: where it lies, what is written into it, and whose it is."""
