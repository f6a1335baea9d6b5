"""The layers that precision plugins put in place of a model's own."""
