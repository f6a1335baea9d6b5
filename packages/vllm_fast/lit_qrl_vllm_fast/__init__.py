"""Changes to vLLM that make it faster, or mend its CPU build; vLLM itself calls `register` in each of its processes."""

import logging

import torch

from lit_qrl.rollout.vllm.installation import PACKAGE, installed_version
from lit_qrl.rollout.vllm.patches import Patch
from lit_qrl_vllm_fast import cpu, decoding, loading

__version__ = "0.1.0"
CHANGES: tuple[Patch, ...] = (*decoding.CHANGES, *loading.CHANGES, *cpu.CHANGES)

log = logging.getLogger(__name__)


def register() -> None:
    """Make the changes that fit the installed vLLM, once, and say in one line which do not; never an error."""
    found = installed_version()
    if found is None:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left_out = []
    for change in CHANGES:
        if change.concerns(found[0], device):
            why = change.misfit()
            if why is None:
                change.make()
            else:
                left_out.append(f"{change.name} ({why})")
    if left_out:
        version = ".".join(map(str, found[0]))
        log.warning("%s leaves out what does not fit vLLM %s: %s.", PACKAGE, version, ", ".join(left_out))
