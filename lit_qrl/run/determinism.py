"""Two runs of one config with the same bits: what torch and the libraries below it are told before a device starts.

`trainer.deterministic` is the one switch. Lightning passes it on to `torch.use_deterministic_algorithms`; the rest of
what changes the order of a sum from run to run, or its rounding with the load of a device, is set here.
"""

import os

import torch

from lit_qrl.errors import ConfigError

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
