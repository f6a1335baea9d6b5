"""The one list of changes to vLLM's code: what stands in this folder."""

from importlib import import_module
from pkgutil import iter_modules

import torch

from lit_qrl.rollout.vllm import patches
from lit_qrl.rollout.vllm.installation import installed_version
from lit_qrl.rollout.vllm.patches.patch import Patch

MACHINERY = ("patch", "table")
PATCHES: tuple[Patch, ...] = tuple(
    import_module(f"{patches.__name__}.{file.name}").PATCH
    for file in iter_modules(patches.__path__)
    if file.name not in MACHINERY
)


def apply_all() -> None:
    """Make every change that the installed vLLM needs here; call before an engine is built.

    Raises:
        ConfigError: for a change that does not fit it.
    """
    found = installed_version()
    if found is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for patch in PATCHES:
            if patch.concerns(found[0], device):
                patch.apply(found[0])
