"""Which of the sampler's kernels a layer of the learner takes."""

import logging
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats import NumberFormat
from lit_qrl.formats.support import names_where, row_of
from lit_qrl.precision.vllm_kernels.kernels import (
    CutlassFP8Row,
    CutlassW4A8,
    Machete,
    MarlinFP4,
    MarlinInt4,
    SamplerKernel,
)

log = logging.getLogger(__name__)

Kernel = Literal["auto", "dequantize", "marlin", "machete"]
KERNELS = ("auto", "dequantize", "marlin", "machete")

# In the order in which vLLM tries them.
_ALL: tuple[SamplerKernel, ...] = (
    CutlassFP8Row(),
    CutlassW4A8(),
    Machete(),
    MarlinInt4(),
    MarlinFP4(),
)


def choose(
    kernel: str, format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> SamplerKernel | str:
    """Return the kernel that vLLM multiplies such a layer with, or why there is none.

    Args:
        kernel: `auto`, or the name of one.
        format: of the weight.
        shape: (out, in) of the weight.
        dtype: of the inputs.
        device: of the inputs.

    >>> from lit_qrl.formats import Int4Group
    >>> choose("auto", Int4Group(), (128, 128), torch.bfloat16, torch.device("cpu"))
    'the learner is on cpu, and the kernels are CUDA ones'
    """
    if device.type != "cuda":
        return f"the learner is on {device.type}, and the kernels are CUDA ones"
    if not installed():
        return "vLLM with its CUDA kernels is not installed"
    from vllm import envs

    reasons: list[str] = []
    for candidate in _ALL:
        if kernel != "auto" and candidate.name != kernel:
            continue
        reason = candidate.missing(format, shape, dtype)
        if reason is None and kernel == "auto" and candidate.vllm_name in envs.VLLM_DISABLED_KERNELS:
            reason = f"{candidate.vllm_name} is in VLLM_DISABLED_KERNELS"
        if reason is None:
            return candidate
        reasons.append(reason)
    return "; ".join(reasons)


class KernelChoice:
    """Which kernel the layers of one plugin take, and what was said about it in the log.

    Args:
        kernel: the plugin's option.
        format: of the weights.
    """

    def __init__(self, kernel: str, format: NumberFormat) -> None:
        if kernel not in KERNELS:
            raise ConfigError("There is no such kernel.", expected=", ".join(KERNELS), given=kernel)
        if kernel in ("machete", "marlin") and kernel not in row_of(format).learner_kernels:
            takes = names_where(lambda row: kernel in row.learner_kernels)
            raise ConfigError(
                f"The kernel {kernel} does not multiply {format.name}.",
                expected=f"{kernel} for {', '.join(takes)}, with activations: null",
                given=f"{format}",
                remedy="Set kernel to auto.",
            )
        self.kernel, self.format = kernel, format
        self.sampler = "torch"
        self.exact = False  # learner and sampler agree to the last bit, so that nothing may be multiplied otherwise
        self._told: set[str] = set()

    def follow(self, module: Any) -> None:
        """Take the kernels of the engine that samples for a Lightning module, where it has one."""
        engine = getattr(getattr(getattr(module, "_trainer", None), "datamodule", None), "engine", None)
        self.sampler = getattr(engine, "kernels", self.sampler)
        self.exact = self.sampler == "vllm" and getattr(engine, "batch_invariant", False)

    def require(self, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> None:
        """Raise `ConfigError` when a kernel was asked for by name and cannot multiply every layer on this host."""
        if self.kernel in ("auto", "dequantize"):
            return
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for name, shape in shapes.items():
            found = choose(self.kernel, self.format, shape, dtype, device)
            if isinstance(found, str):
                raise ConfigError(
                    f"The kernel {self.kernel} cannot multiply {name} {shape}: {found}.",
                    remedy="Set kernel to auto, which falls back layer by layer, or exclude the layer.",
                )

    def pick(self, name: str, shape: tuple[int, int], x: Tensor) -> SamplerKernel | None:
        """Return the kernel for a layer and its input, or None where the weight is multiplied out."""
        if self.kernel == "dequantize" or (self.kernel == "auto" and self.sampler != "vllm"):
            return None
        found = choose(self.kernel, self.format, shape, x.dtype, x.device)
        told = found if isinstance(found, str) else found.vllm_name
        if isinstance(found, str) and self.exact:
            raise ConfigError(
                f"The learner cannot multiply {name} {shape} by the sampler's kernel: {found}.",
                expected="the same kernel on both sides, as data.engine.batch_invariant asks for",
                given=f"{self.format.name}, multiplied out",
                remedy="Exclude the layer in the plugin, or set data.engine.batch_invariant to false.",
            )
        if told not in self._told:
            self._told.add(told)
            if isinstance(found, str):
                log.warning("%s is multiplied out in the learner, unlike in the sampler: %s.", name, found)
            else:
                log.info("%s takes the sampler's kernel %s.", name, told)
        return None if isinstance(found, str) else found


@lru_cache
def installed() -> bool:
    """Return True when vLLM with its CUDA kernels can be imported."""
    if find_spec("vllm") is None:
        return False
    from vllm import _custom_ops  # noqa: F401  registers the kernels
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())
