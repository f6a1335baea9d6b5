"""The instruction sets and vLLM operators that tests find on this CPU, and a way to hide the newer ones.

As a program it prints them: `python -m tests.cpu_kernels`.
"""

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat

VARIABLE = "LIT_QRL_TEST_ISA"
"""`avx2` makes torch, oneDNN and vLLM choose as on a CPU without AVX-512; unset leaves the choice to them."""
ABSENT = "no kernel on this host: "
"""How the reason of a test begins that is skipped for want of one."""
_LIMITS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_SHOWN = ("avx2", "avx_vnni", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_tile")


def limit() -> None:
    """Hide what `LIT_QRL_TEST_ISA` says; call before torch computes anything and before vLLM is imported."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "avx2"):
        raise ValueError(f"{VARIABLE} is not known. Expected: avx2, or nothing. Given: {asked}.")
    if asked:
        import torch

        os.environ.update(_LIMITS)  # each library reads its own at its first use
        # vLLM asks these which of its libraries to load, and what to multiply with.
        for name in ("avx512", "avx512_bf16", "amx_tile", "amx_fp16"):
            setattr(torch.cpu, f"_is_{name}_supported", lambda: False)


def describe() -> list[str]:
    """Return one line on the CPU and one on the operators of vLLM's library."""
    import torch

    flags = torch.cpu.get_capabilities()
    shown = ", ".join(name for name in _SHOWN if flags.get(name)) or "none of " + ", ".join(_SHOWN)
    limited = f", limited by {VARIABLE}={os.environ[VARIABLE]}" if os.environ.get(VARIABLE) else ""
    return [f"CPU: torch computes with {torch.backends.cpu.get_cpu_capability()} of {shown}{limited}", _operators()]


def _operators() -> str:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM: not installed"
    import torch

    if torch.cuda.is_available():
        return "vLLM: built for CUDA; its CPU operators do not matter"
    from lit_qrl.formats import support
    from lit_qrl.rollout.vllm import cpu as vllm_cpu

    needed = {format: row.vllm_cpu_operators for format, row in support.TABLE.items() if row.vllm_cpu_operators}
    missing = {format: vllm_cpu.missing_operators(names) for format, names in needed.items()}
    parts = [
        f"{format} {'has' if not missing[format] else 'lacks'} {', '.join(missing[format] or names)}"
        for format, names in needed.items()
    ]
    if not missing["int8_channel"]:
        got, exact = vllm_cpu.int8_product()
        parts.append("INT8 sums are exact" if got == exact else f"INT8 sums overflow ({got:.0f} of {exact:.0f})")
    return f"vLLM on CPU ({_library()}): {'; '.join(parts)}"


def _library() -> str:
    """Return the file that vLLM loaded its operators from."""
    with open("/proc/self/maps") as maps:
        files = {os.path.basename(line.split()[-1]) for line in maps if "/vllm/_C" in line}
    return ", ".join(sorted(files)) or "no library of operators"


def skip_without_kernel(format: "NumberFormat | None") -> None:
    """Skip the test that runs where vLLM has no kernel for the format, with what an engine would say of it."""
    import pytest

    from lit_qrl.errors import ConfigError
    from lit_qrl.rollout.vllm.checks import check_operators

    try:
        check_operators(format)
    except ConfigError as error:
        pytest.skip(f"{ABSENT}{error.what}")


def described() -> list[str]:
    """Return `describe()` of a process of its own, so that this one has not imported vLLM."""
    command = [sys.executable, "-m", "tests.cpu_kernels"]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        return [f"CPU: not known, {' '.join(command[1:])} failed: {done.stderr.strip().rpartition(chr(10))[2]}"]
    return done.stdout.splitlines()[-2:]


if __name__ == "__main__":
    limit()
    print("\n".join(describe()))
