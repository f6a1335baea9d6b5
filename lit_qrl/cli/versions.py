"""`lit-qrl --versions`: the libraries here, the versions that are taken, of vLLM too, and changes to its code."""

import platform
import textwrap
from importlib.metadata import PackageNotFoundError, metadata, version

import torch
from packaging.requirements import Requirement

from lit_qrl import __version__
from lit_qrl.rollout.vllm.installation import PACKAGE, accepted, installed_version
from lit_qrl.rollout.vllm.patches import PATCHES

LIBRARIES = (
    "torch",
    "triton",
    "lightning",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "jsonargparse",
    "torchmetrics",
    "compressed-tensors",
    "bitsandbytes",
    "transformer-engine",
)


def versions() -> str:
    """Return the text; nothing is imported but torch."""
    found = installed_version()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    taken = _taken()
    rows = [("lit-qrl", __version__), ("python", platform.python_version()), *((n, _version(n)) for n in LIBRARIES)]
    rows = [(name, f"{here:<18}{taken.get(name, '')}".rstrip()) for name, here in rows]
    if found is None:
        rows.append(("vllm", "not installed"))
    else:
        rows.append(("vllm", ".".join(map(str, found[0])) + (" (CPU build)" if found[1] else "")))
    lines = [f"{name:<20}{value}" for name, value in (*rows, ("accepted", accepted()))]
    lines += ["", f"Changes to vLLM's code{'' if found is None else f', * in this one on {device}'}:"]
    for patch in PATCHES:
        mark = "*" if found is not None and patch.concerns(found[0], device) else " "
        lines.append(f"{mark} {patch.name:<24}{patch.versions}, {patch.device or 'any device'}")
        wrong = f"without it {patch.wrong}; {patch.seen}"
        lines.append(textwrap.fill(wrong, 110, initial_indent=" " * 4, subsequent_indent=" " * 4))
    lines += ["", f"Plug-in {PACKAGE}: {_version(PACKAGE)} (python -m lit_qrl_vllm_fast lists its changes)"]
    return "\n".join(lines)


def _taken() -> dict[str, str]:
    """Return which versions the project's own metadata asks for, by name; nothing where it is not installed."""
    try:
        about = metadata("lit-qrl")
    except PackageNotFoundError:
        return {}
    asked = [Requirement(line) for line in about.get_all("Requires-Dist") or ()]
    return {"python": about["Requires-Python"]} | {one.name: str(one.specifier) for one in asked if one.specifier}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
