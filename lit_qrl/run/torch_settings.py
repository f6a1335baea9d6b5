"""What torch and the libraries below it are told before a device starts: how memory is taken, and that bits repeat.

Of segments of fixed sizes a run keeps many that its next tensors do not fit in: the lengths of completions differ from
iteration to iteration. Segments that grow leave no such gaps: at 1.5B the driver shows 38 to 42 GiB instead of 51.5.

`trainer.deterministic` is the one switch for two runs of one config with the same bits. Lightning passes it on to
`torch.use_deterministic_algorithms`; the rest of what changes the order of a sum from run to run, or its rounding with
the load of a device, is set here.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lit_qrl.errors import ConfigError

if TYPE_CHECKING:  # whoever sets the allocator up has not imported torch yet
    import torch


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that torch reads, in its order."""
GROWING = "expandable_segments"


def let_segments_grow() -> None:
    """Let torch's allocator grow its segments, unless the user has set it up; to be called before torch is imported.

    The variable is that which vLLM looks for, whose own pools cannot grow: it switches them back for the time that it
    fills those.
    """
    if not any(os.environ.get(name) for name in NAMES):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"{GROWING}:True"


def keep_segments_fixed() -> None:
    """Let torch's allocator not grow its segments in this process and those that it starts; before any are taken."""
    for name in NAMES:
        if f"{GROWING}:True" in os.environ.get(name, ""):
            os.environ[name] = os.environ[name].replace(f"{GROWING}:True", f"{GROWING}:False")
            if "torch" in sys.modules:
                _settle(os.environ[name])


@contextmanager
def fixed_segments(device: "torch.device") -> Iterator[Any]:
    """Take the memory of what is allocated in the block in segments of fixed sizes, which other processes can open.

    It gives the pool that they are of, which should live as long as they do.

    What a segment that grows is shared by is a file descriptor, which a process that may not trace this one cannot
    take.

    Args:
        device: where; on a CPU nothing changes.
    """
    import torch

    given = next((found for name in NAMES if (found := os.environ.get(name))), "")
    if device.type != "cuda" or f"{GROWING}:True" not in given:
        yield None
        return
    pool = torch.cuda.MemPool()  # what is free in segments that grow is not taken for it
    _settle(given.replace(f"{GROWING}:True", f"{GROWING}:False"))
    try:
        with torch.cuda.device(device), torch.cuda.use_mem_pool(pool):  # of the current device, where none has a number
            yield pool
    finally:
        _settle(given)


def _settle(options: str) -> None:
    import torch

    torch._C._accelerator_setAllocatorSettings(options)  # all of them: those left out go back to torch's defaults


VARIABLES: dict[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),  # else cuBLAS picks its split of a sum by the workspace it finds
    "NCCL_ALGO": ("Ring", "Tree"),  # else chosen by message size and load
    "NCCL_PROTO": ("Simple", "LL", "LL128"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),  # Transformer Engine's attention
    "FLASH_ATTENTION_DETERMINISTIC": ("1",),  # the backward pass of flash-attn, in Transformers
    "VLLM_MARLIN_USE_ATOMIC_ADD": ("0",),
    "HCCL_DETERMINISTIC": ("true", "strict"),  # Ascend's collectives
}
"""Environment variables by name: the values that are deterministic, of which the first is set where there is none."""


def make_deterministic() -> bool:
    """Set variables and switches where the Trainer is deterministic, and return whether it is.

    Raises:
        ConfigError: for a variable that the user has set to something else.
    """
    import torch

    if not torch.are_deterministic_algorithms_enabled():
        return False
    for name, values in VARIABLES.items():
        given = os.environ.setdefault(name, values[0])
        if given not in values:
            raise ConfigError(
                f"trainer.deterministic asks for the same bits in every run, and {name} allows others.",
                expected=f"{name}={' or '.join(values)}",
                given=given,
                remedy=f"Unset {name}, or set trainer.deterministic to false.",
            )
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # Filling memory that is about to be overwritten costs time and makes nothing deterministic.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return True
