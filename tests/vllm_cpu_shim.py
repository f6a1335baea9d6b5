"""Torch kernels that let the CPU build of vLLM load and run fp8_block and nvfp4; only the GEMMs are emulated.

Loaders, repacking and the reload path stay vLLM's own. NVFP4 weights are stored transposed, so that this format is
one whose layout differs from the checkpoint's, as with Marlin on a GPU.
"""

import torch
from torch import Tensor, nn

from tests.format_rows import override

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_done: list[bool] = []


def install() -> None:
    """Register the kernels, once per process; call before an engine is built."""
    for name in ("fp8_block", "nvfp4"):
        override(name, vllm=("cpu", "cuda"))
    if _done:
        return
    _done.append(True)
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import PlatformEnum
    from vllm.plugins import load_general_plugins

    from lit_qrl.rollout.vllm.patches import apply_all

    load_general_plugins()
    apply_all()

    class TorchBlockFP8(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            rows, columns = self.weight_group_shape
            x = A.float() * As.repeat_interleave(columns, dim=1)[:, : A.shape[1]]
            scale = Bs.float().repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
            weight = B.float() * scale[: B.shape[0], : B.shape[1]]
            return (x @ weight.T).to(self.config.out_dtype)

    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(TorchBlockFP8)
    marlin = kernels.MarlinNvFp4LinearKernel
    marlin.is_supported = classmethod(lambda cls, capability=None: (True, None))
    marlin.process_weights_after_loading = _turn
    marlin.apply_weights = _apply_nvfp4


def _turn(kernel: object, layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.T.contiguous(), requires_grad=False)


def _apply_nvfp4(kernel: object, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    packed = layer.weight.T
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1).long()
    values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    weight = values * layer.weight_scale.float().repeat_interleave(16, dim=1) * layer.weight_global_scale
    return nn.functional.linear(x, weight.to(x.dtype), bias)
