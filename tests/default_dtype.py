"""The default dtype that Lightning's 16-bit plugins set around the learner's passes."""

from contextlib import contextmanager

import torch


@contextmanager
def bf16_default():
    """Make bf16 the dtype of tensors that are made without one, as `bf16-true` does around a validation step."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
