"""NF4, weight only: the 16 quantiles of a normal distribution in blocks of 64 (QLoRA, as in bitsandbytes)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, QuantizedWeight, expect_shape
from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.numerics import require_finite

BLOCK = 64
# Quantiles of N(0, 1) scaled to [-1, 1], with an exact zero (QLoRA, arXiv:2305.14314, appendix E).
TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_SMALLEST_AMAX = 1e-38
_STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclass(frozen=True)
class NF4(NumberFormat):
    """Weights as the nearest of 16 normal quantiles times the fp32 amax of 64 consecutive weights."""

    name: ClassVar[str] = "nf4"
    bits_per_weight: ClassVar[float] = 4.0 + 32.0 / BLOCK
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_absmax")

    def check(self, name: str, shape: tuple[int, int]) -> None:
        if shape[0] * shape[1] % BLOCK:
            raise ConfigError(
                f"{name} does not fit nf4.",
                expected=f"a multiple of {BLOCK} weights",
                given=f"a weight of shape {tuple(shape)}",
                remedy="Exclude the layer.",
            )

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes "out·in/2 1" (two per byte, the first in the high half) and amaxes " out·in/64" in fp32.

        >>> q = NF4().quantize(torch.tensor([[-2.0, 2.0] + [0.0] * 62]))
        >>> q.codes[:2].flatten().tolist(), q.scales.tolist()
        ([15, 119], [2.0])
        """
        self.check("This weight", (weight.shape[0], weight.shape[1]))
        blocks = weight.detach().reshape(-1, BLOCK).float()
        amax = blocks.abs().amax(dim=-1)
        require_finite(amax)
        # multiplied by the inverse, as the reference kernels do: a division rounds some weights to another code
        unit = blocks * (1.0 / amax.clamp(min=_SMALLEST_AMAX)).unsqueeze(-1)
        table = _table(weight.device)
        codes = torch.bucketize(unit.clamp_(-1, 1), (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
        codes = codes.view(-1, 2)
        packed = (codes[:, 0] << 4 | codes[:, 1]).unsqueeze(1)
        return QuantizedWeight(packed, amax, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return dispatch.packed_values(q, BLOCK, "NF4", dtype, _table(q.codes.device))

    def checkpoint(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that transformers reads into a bitsandbytes layer."""
        assert q.scales is not None
        state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(q.shape)}
        yield f"{name}.weight", q.codes
        yield f"{name}.weight.absmax", q.scales
        yield f"{name}.weight.quant_map", _table(q.codes.device)
        yield f"{name}.{_STATE}", torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        codes, amax = ("weight", "weight.absmax") if "weight.absmax" in tensors else ("weight_packed", "weight_absmax")
        q = QuantizedWeight(tensors[codes], tensors[amax], None, self, shape)
        return expect_shape(q, (shape[0] * shape[1] // 2, 1))

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(ignore),
        }


def _table(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.float32, device=device)
