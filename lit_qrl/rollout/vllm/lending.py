"""What a vLLM engine's kernels read, handed to a learner that holds no base of its own."""

from typing import Any

import torch

from lit_qrl.errors import ConfigError
from lit_qrl.formats import support
from lit_qrl.formats.base import NumberFormat
from lit_qrl.precision.vllm_kernels.borrowed import TILE_IN, TILE_OUT, MarlinNVFP4
from lit_qrl.rollout.vllm.live_model import LiveModel


class MarlinLender:
    """The part of `VLLMEngine` that lets a learner compute with its NVFP4 weights: see `LendsWeights`."""

    sleep_level: int
    live: LiveModel | None
    lent: bool
    """True once a learner got a weight; closing then leaves the weights' memory alone."""

    def check_sharing(self, format: NumberFormat | None) -> None:
        """Raise `ConfigError` where a learner could not read the engine's weights in place of its own."""
        device = support.device_here()
        if format is None or device not in support.row_of(format).vllm_lends:
            name, device = "none" if format is None else format.name, device.upper()
            known = ", ".join(support.names_where(lambda row: "cuda" in row.vllm_lends))
            raise ConfigError(
                f"share_weights does not work with {name} on {device}: vLLM's layout of it is not known here.",
                expected=f"{known} on CUDA, which vLLM holds in Marlin's layout",
                given=f"{name} on {device}",
                remedy="Set share_weights to false.",
            )
        if self.sleep_level:
            raise ConfigError(
                "An engine that sleeps would take the base away from the learner that shares it.",
                expected="data.engine.sleep_level: 0 with share_weights",
                given=self.sleep_level,
                remedy="Set one of them to its default.",
            )

    def stored_weight(self, layer: str) -> MarlinNVFP4 | None:
        """Return a layer's NVFP4 weight as it lies in the memory of Marlin's kernel, or None where it lies otherwise.

        Args:
            layer: name in the checkpoint, such as `model.layers.0.self_attn.k_proj`.
        """
        place = None if self.live is None else self.live.locate_layer(layer)
        module: Any = None if place is None else place.module
        words, scales = getattr(module, "weight", None), getattr(module, "weight_scale", None)
        if place is None or words is None or scales is None or words.ndim != 2 or scales.dtype != torch.float8_e4m3fn:
            return None
        inputs, outputs = int(module.input_size_per_partition), int(module.output_size_per_partition)
        whole = (inputs // TILE_IN, outputs * TILE_IN // 8)  # what Marlin padded has other sides
        if words.dtype != torch.int32 or tuple(words.shape) != whole or tuple(scales.shape) != (whole[0], outputs):
            return None
        if inputs % TILE_IN or outputs % TILE_OUT:
            return None
        sizes = [int(size) for size in module.output_sizes] if place.parts else [outputs]
        self.lent = True
        return MarlinNVFP4(
            words.detach(),
            scales.detach().view(torch.uint8),
            sum(sizes[: place.part]),
            sizes[place.part],
        )
