"""What follows where a GPU does not multiply FP8: a refusal, or one warning where FP8 is emulated."""

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.formats.kernels import gemm

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat

log = logging.getLogger(__name__)


class Lacking(NamedTuple):
    """What a GPU lacks: the sentence, what would do, and what there is."""

    what: str
    expected: str
    given: str


def lacking(user: str, format: "NumberFormat | None", device: torch.device, blocks: bool = False) -> Lacking | None:
    """Return what a GPU lacks to multiply in an FP8 format, or None; on a CPU FP8 is emulated, and nobody wonders.

    Args:
        user: who multiplies, as the sentence begins.
        format: of the linear layers.
        device: where they are.
        blocks: whether fp8_block takes cuBLASLt's block scaling, as our own GEMM does and vLLM's kernels do not.
    """
    if format is None or not format.name.startswith("fp8") or device.type != "cuda":
        return None
    blocks = blocks and format.name == "fp8_block"
    if gemm.fp8_block_gemm(device, (gemm.BLOCK, gemm.BLOCK)) if blocks else gemm.has_fp8(device):
        return None
    capability = ".".join(map(str, gemm.capability(device.index)))
    version = f", CUDA {torch.version.cuda}" if blocks else ""
    return Lacking(
        f"{user} multiplies in {format.name}, for which there is no FP8 GEMM on this GPU.",
        "compute capability 9.0 and CUDA 12.9 or newer" if blocks else "compute capability 8.9 or newer",
        f"{torch.cuda.get_device_name(device)} ({capability}{version})",
    )


def require_fp8(user: str, format: "NumberFormat | None", device: torch.device, remedy: str) -> None:
    """Raise `ConfigError` for an FP8 format on a GPU that does not know FP8.

    Args:
        user: who multiplies, as the sentence begins.
        format: of the linear layers.
        device: where they are.
        remedy: what to do, as an instruction.
    """
    found = lacking(user, format, device)
    if found is not None:
        raise ConfigError(found.what, expected=found.expected, given=found.given, remedy=remedy)


def tell_emulated(user: str, format: "NumberFormat | None", device: torch.device) -> None:
    """Warn, once per process, that our own GEMM emulates an FP8 format on this GPU.

    Args:
        user: who multiplies, as the sentence begins.
        format: of the linear layers.
        device: where they are.
    """
    found = lacking(user, format, device, blocks=True)
    if found is not None:
        _warn(
            f"{found.what} Expected: {found.expected}. Given: {found.given}. "
            "It is emulated: the same numbers, at the speed of fp32."
        )


@lru_cache
def _warn(message: str) -> None:
    log.warning("%s", message)
