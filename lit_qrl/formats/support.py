"""What each number format can do where: one table, which every room above asks, and what follows where a GPU lacks it.

The embedded engine and `audit` take every format that is registered; the table is about the rest.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.formats.kernels import gemm

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FormatSupport:
    """What one format can do; devices are `cpu` and `cuda`. The defaults are those of a format that nobody else knows.

    Args:
        audited: whether `lit-qrl audit` measures it unless told otherwise.
        fp8: what a GPU needs to multiply in it where that is FP8; a learner and vLLM are refused on others.
        own_gemm: what our own GEMM needs where that is more; it emulates the format on others.
        vllm: devices on which vLLM has a kernel for it.
        vllm_cpu_operators: operators of vLLM's CPU build (`torch.ops._C`) that its GEMM calls; it may need none.
        vllm_gpu: what a GPU needs for vLLM's kernel, beside `fp8`.
        vllm_half_only: devices on which that kernel has no fp32 activations.
        vllm_head: whether vLLM's loader of an output head places its scales: it expects a row for each word, or one
            number.
        vllm_experts: devices on which the experts of a mixture were verified in vLLM in it.
        vllm_methods: vLLM's classes that compute in it (a layer's scheme without `CompressedTensors`, else its method,
            that of experts without `MoEMethod`); where one serves several formats, with what tells them apart, as in
            `W8A8Fp8[channel]`.
        vllm_copied: those whose kernels read the module's own tensors and nothing else, so that writing those is all
            there is to do.
        vllm_copied_on: devices where that is so; on a CPU kernels keep packed copies out of sight.
        vllm_lends: devices on which a learner can compute with the weights in vLLM's memory.
        vllm_varies: whether vLLM's kernel for it on CUDA was not seen to add in one order in every batch.
        folders: whether `quantize` and `export` write folders in it: those that some library reads, or a format's own.
        folder_experts: libraries that read the experts of a mixture in it from a folder, beside `NVFP4LoRA` where it is
            weight-only.
        folder_dtype: dtype of everything else in a folder, where libraries multiply the codes out in no other.
        under: rows of the same weights under activations that the format's option `activations` has quantized.
    """

    audited: bool = True
    fp8: gemm.Requirement | None = None
    own_gemm: gemm.Requirement | None = None
    vllm: tuple[str, ...] = ()
    vllm_cpu_operators: tuple[str, ...] = ()
    vllm_gpu: gemm.Requirement | None = None
    vllm_half_only: tuple[str, ...] = ("cuda",)
    vllm_head: bool = False
    vllm_experts: tuple[str, ...] = ()
    vllm_methods: tuple[str, ...] = ()
    vllm_copied: tuple[str, ...] = ()
    vllm_copied_on: tuple[str, ...] = ("cuda",)
    vllm_lends: tuple[str, ...] = ()
    vllm_varies: bool = True
    folders: bool = True
    folder_experts: tuple[str, ...] = ()
    folder_dtype: torch.dtype | None = None
    under: Mapping[str, "FormatSupport"] = field(default_factory=dict)


_BOTH = ("cpu", "cuda")
_LIBRARIES = ("vLLM", "transformers")
_READ = FormatSupport(folder_experts=("vLLM",))
_PLAIN = replace(
    _READ, vllm=_BOTH, vllm_varies=False, vllm_copied=("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
)
_FP8 = replace(_READ, fp8=gemm.FP8, vllm=_BOTH, vllm_head=True, vllm_copied=("W8A8Fp8",))
_4_BITS = replace(_READ, vllm=("cuda",), folder_dtype=torch.bfloat16)
_INT4 = replace(_READ, vllm=("cuda",), vllm_half_only=_BOTH, vllm_head=True)

TABLE: dict[str, FormatSupport] = {
    "bf16": _PLAIN,
    "fp16": replace(_PLAIN, audited=False),
    "fp32": replace(_PLAIN, audited=False),
    "fp8_tensor": replace(
        _FP8,
        folder_experts=_LIBRARIES,
        vllm_methods=("W8A8Fp8[tensor]", "W8A16Fp8[tensor]", "Fp8LinearMethod[tensor]"),
    ),
    "fp8_row": replace(
        _FP8,
        vllm_varies=False,
        vllm_experts=("cuda",),
        folder_experts=_LIBRARIES,
        vllm_methods=("W8A8Fp8[channel]", "W8A16Fp8[channel]"),
    ),
    "fp8_block": replace(
        _FP8,
        own_gemm=gemm.FP8_BLOCKS,
        vllm=("cuda",),
        vllm_varies=False,  # with the learner's product, as `same_kernels` has it
        vllm_head=False,
        vllm_experts=("cuda",),
        vllm_methods=("W8A8Fp8[block]", "W8A16Fp8[block]", "Fp8LinearMethod[block]"),
    ),
    "int8_channel": replace(
        _READ,
        vllm=_BOTH,
        vllm_cpu_operators=("dynamic_scaled_int8_quant", "create_onednn_scaled_mm_handler", "onednn_scaled_mm"),
        vllm_head=True,
        vllm_experts=("cuda",),
        vllm_methods=("W8A8Int8",),
    ),
    "int4_group": replace(
        _INT4,
        vllm=_BOTH,
        vllm_cpu_operators=("cpu_gemm_wna16",),
        vllm_experts=("cuda",),
        folder_experts=_LIBRARIES,
        vllm_methods=("WNA16[4]", "WNA16Marlin[4]", "W4A8Fp8", "WNA8Int", "W4A8Int"),
        under={"fp8": replace(_INT4, vllm_gpu=gemm.Requirement((9, 0), newer=False)), "int8": _INT4},
    ),
    "nvfp4": replace(
        _4_BITS,
        vllm_head=True,
        vllm_experts=("cuda",),
        vllm_methods=("W4A4Fp4", "W4A16Fp4", "W4A4Nvfp4"),
        vllm_lends=("cuda",),
    ),
    "mxfp4": replace(_4_BITS, vllm_methods=("W4A4Mxfp4", "W4A16Mxfp4")),
    # vLLM multiplies it on Blackwell, where nobody tried it yet; below, Marlin leaves the activations as they are.
    "mxfp8": FormatSupport(audited=False),
    "nf4": FormatSupport(audited=False),
    "int3_channel": FormatSupport(audited=False, folders=False),
}
"""A row for each format, by name."""


def row_of(format: "NumberFormat") -> FormatSupport:
    """Return what a format can do, as its options say; of one that is not in the table, what no other room knows.

    >>> from lit_qrl.formats import Int4Group
    >>> row_of(Int4Group()).vllm, row_of(Int4Group(activations="fp8")).vllm
    (('cpu', 'cuda'), ('cuda',))
    """
    row = TABLE.get(format.name, FormatSupport())
    return row.under.get(getattr(format, "activations", None) or "", row)


def names_where(test: Callable[[FormatSupport], bool]) -> list[str]:
    """Return the names of the formats whose row passes the test, in the table's order.

    >>> names_where(lambda row: "cuda" in row.vllm_lends)
    ['nvfp4']
    """
    return [name for name, row in TABLE.items() if test(row)]


def device_here() -> str:
    """Return the device of this host's vLLM, as rows name it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def lacking(user: str, format: "NumberFormat | None", device: torch.device, own: bool = False) -> dict[str, str] | None:
    """Return what a GPU lacks to multiply in an FP8 format, in the words of `ConfigError`, or None.

    On a CPU FP8 is emulated, and nobody wonders.

    Args:
        user: who multiplies, as the sentence begins.
        format: of the linear layers.
        device: where they are.
        own: whether our own GEMM multiplies, which may need more.
    """
    row = FormatSupport() if format is None else row_of(format)
    needed = row.own_gemm or row.fp8 if own else row.fp8
    if format is None or needed is None or device.type != "cuda" or needed.met(device):
        return None
    what = f"{user} multiplies in {format.name}, for which there is no FP8 GEMM on this GPU."
    return {"what": what, "expected": str(needed), "given": needed.given(device)}


def require_fp8(user: str, format: "NumberFormat | None", device: torch.device, remedy: str) -> None:
    """Raise `ConfigError` for an FP8 format on a GPU that does not know FP8; the arguments are those of `lacking`."""
    found = lacking(user, format, device)
    if found is not None:
        raise ConfigError(**found, remedy=remedy)


def tell_emulated(user: str, format: "NumberFormat | None", device: torch.device) -> None:
    """Warn, once per process, that our own GEMM emulates an FP8 format on this GPU."""
    found = lacking(user, format, device, own=True)
    if found is not None:
        _warn(
            "{what} Expected: {expected}. Given: {given}. "
            "It is emulated: the same numbers, at the speed of fp32.".format(**found)
        )


@lru_cache
def _warn(message: str) -> None:
    log.warning("%s", message)
