"""`python -m lit_qrl_vllm_fast`: every change, what it brings, and whether it fits the installed vLLM."""

import torch

from lit_qrl.rollout.vllm.installation import installed_version
from lit_qrl_vllm_fast import CHANGES

found = installed_version()
device = "cuda" if torch.cuda.is_available() else "cpu"
for change in CHANGES:
    state = "of another device or version"
    if found is None:
        state = "vLLM is not installed"
    elif change.concerns(found[0], device):
        why = change.misfit()
        state = "fits" if why is None else f"left out: {why}"
    print(f"{change.name:<24}{change.device or 'any':<6}{change.versions}: {state}\n    {change.wrong}; {change.seen}")
