"""Norms and gated activations before FP8 layers make the codes of their output in the same kernel.

Where vLLM does not compile a model it launches a kernel for each linear layer that quantizes its input: of a decoding
step of 28 layers 112, each of which takes longer to launch than to compute. Three of four are saved
(`rollout/codes_triton.py`): the codes travel with the tensor that they are of, to the one layer that reads it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Decoder layers in which a norm's output is read by one linear layer, as it is."""
READERS = {
    "input_layernorm": "self_attn.qkv_proj",
    "post_attention_layernorm": "mlp.gate_up_proj",
    "mlp.act_fn": "mlp.down_proj",
}
BY_ROW = {"CutlassFp8BlockScaledMMKernel": False, "CutlassFP8ScaledMMLinearKernel": True}
"""vLLM's kernels that take such codes, and whether their scales are of rows."""
MOST_ROWS = 512
"""Rows up to which a step waits for launches."""
WIDEST = 32768
_BY_ROW, _CODES = "_lit_qrl_codes_by_row", "_lit_qrl_codes"


def mark(model: nn.Module) -> int:
    """Let norms and activations know which codes the layer wants that reads their output; return how many do."""
    count = 0
    for layer in model.modules():
        if type(layer).__name__ in LAYERS:
            for maker, reader in READERS.items():
                made, kind = _at(layer, maker), _kind(_at(layer, reader))
                if type(made).__name__ in ("RMSNorm", "SiluAndMul") and kind is not None:
                    setattr(made, _BY_ROW, kind)
                    count += 1
    return count


def _at(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _kind(reader: Any) -> bool | None:
    kernel = getattr(getattr(reader, "scheme", None), "fp8_linear", None)
    quantizer = getattr(kernel, "quant_fp8", None)
    if quantizer is None or quantizer.static or not (quantizer.is_group_quant or quantizer.use_per_token_if_dynamic):
        return None
    return BY_ROW.get(type(kernel).__name__)


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_weights_after_loading(model: nn.Module, *args: Any, **named: Any) -> Any:
        out = original(model, *args, **named)
        mark(model)
        return out

    return process_weights_after_loading


def _wanted(module: nn.Module, x: Tensor, width: int) -> bool:
    few = not torch.compiler.is_compiling() and x.ndim == 2 and x.shape[0] <= MOST_ROWS and width <= WIDEST
    half = x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous() and width % 128 == 0
    return few and half and x.device.type == "cuda" and getattr(module, _BY_ROW, None) is not None and not _invariant()


def _with_codes(made: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    setattr(made[0], _CODES, made[1:])
    return made[0]


def _norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_cuda(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        plain = self.variance_size_override is None and self.has_weight and self.weight.dtype == x.dtype
        if not plain or not _wanted(self, x, x.shape[-1]) or not (residual is None or residual.is_contiguous()):
            return original(self, x, residual)
        from lit_qrl.rollout import codes_triton

        eps, by_row = self.variance_epsilon, getattr(self, _BY_ROW)
        y = _with_codes(codes_triton.norm(x, residual, self.weight.data, eps, by_row))
        return y if residual is None else (y, residual)

    return forward_cuda


def _gated(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward_cuda(self: Any, x: Tensor) -> Tensor:
        if not _wanted(self, x, x.shape[-1] // 2):
            return original(self, x)
        from lit_qrl.rollout import codes_triton

        return _with_codes(codes_triton.gated(x, getattr(self, _BY_ROW)))

    return forward_cuda


def kept_codes(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the codes and scales that came with a layer's input, or None."""
    return getattr(x, _CODES, None)


def _by_row(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply_weights(self: Any, layer: Any, x: Any, bias: Tensor | None = None, **named: Any) -> Tensor:
        kept = kept_codes(x)
        if kept is None:
            return original(self, layer, x, bias, **named)
        weight, scale, *_ = self._get_layer_params(layer)
        return self.apply_scaled_mm(
            A=kept[0],
            B=weight,
            out_dtype=self.config.out_dtype or x.dtype,
            As=kept[1],
            Bs=scale,
            bias=bias,
            output_shape=[*x.shape[:-1], weight.shape[1]],
        )

    return apply_weights


def _invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


_KERNELS = "vllm.model_executor.kernels.linear.scaled_mm.cutlass:"

PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM quantizes in its norms and activations without compiling the model",
    {
        "vllm.model_executor.model_loader.base_loader:process_weights_after_loading": _marking,
        "vllm.model_executor.layers.layernorm:RMSNorm.forward_cuda": _norm,
        "vllm.model_executor.layers.activation:SiluAndMul.forward_cuda": _gated,
        f"{_KERNELS}CutlassFP8ScaledMMLinearKernel.apply_weights": _by_row,
    },
    needs=(f"{_KERNELS}CutlassFp8BlockScaledMMKernel", "vllm.model_executor.layers.layernorm:RMSNorm.has_weight"),
    device="cuda",
)
