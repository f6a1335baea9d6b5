"""What the precision plugins share: a linear layer with cached low-bit weights, and the Lightning plugin around it."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight
from lit_qrl.network.linears import SwapReport, check_quantizable, fused_groups, quantizable_linears, swap_linears
from lit_qrl.network.names import is_adapted
from lit_qrl.network.stream import quantize_named
from lit_qrl.precision.source import Held, PublishingPrecision, WeightSource

log = logging.getLogger(__name__)


class StepClock:
    """Counts optimizer steps, so that a cached weight cannot outlive an update that no version counter saw."""

    ticks: int = 0


class LowBitLinear(nn.Linear):
    """A linear layer of the learner that also holds its weight in a number format, made anew after each update.

    Parameters keep their names, shapes and dtypes; what is derived from them is no buffer, so a checkpoint of the
    plain model fits. Subclasses say how the low-bit weight is used.
    """

    is_swapped = True
    layer_name: str
    format: NumberFormat
    clock: StepClock
    siblings: tuple["LowBitLinear", ...]
    _cached: tuple[Any, QuantizedWeight] | None
    _amax: tuple[Any, Tensor] | None
    _prepared: dict[Any, Any]

    @classmethod
    def from_linear(cls, linear: nn.Linear, name: str, format: NumberFormat, clock: StepClock) -> "LowBitLinear":
        """Return the layer that takes the place of `linear` and owns its parameters."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        layer.layer_name, layer.format, layer.clock = name, format, clock
        layer.siblings = (layer,)
        object.__setattr__(layer, "_prepared", {})
        layer.drop_cache()
        return layer

    def _weight_version(self) -> tuple[int, int, int]:
        # Optimizers and checkpoints write in place, which raises the version; a replaced tensor has another address.
        return self.weight._version, self.weight.data_ptr(), self.clock.ticks

    def quantized(self) -> QuantizedWeight:
        """Return the weight in the format, quantized once per version of it."""
        shares = self.format.shares_amax and len(self.siblings) > 1
        key = tuple(part._weight_version() for part in self.siblings) if shares else self._weight_version()
        if self._cached is None or self._cached[0] != key:
            # not an inference tensor, even when a validation comes first: the next training step reuses it
            with torch.inference_mode(False), torch.no_grad():
                shared = torch.stack([part._own_amax() for part in self.siblings]).amax() if shares else None
                self._cached = (key, quantize_named(self.format, self.layer_name, self.weight, shared))
            self._prepared.clear()
        return self._cached[1]

    def _own_amax(self) -> Tensor:
        key = self._weight_version()
        if self._amax is None or self._amax[0] != key:
            self._amax = (key, self.weight.detach().abs().amax())
        return self._amax[1]

    def prepared(self, dtype: torch.dtype) -> PreparedWeight:
        """Return the operand of the format's GEMM for inputs of `dtype`, made once per version of the weight."""
        q = self.quantized()
        if dtype not in self._prepared:
            with torch.inference_mode(False), torch.no_grad():
                self._prepared[dtype] = self.format.prepare(q, dtype)
        return self._prepared[dtype]

    def drop_cache(self) -> None:
        """Forget the low-bit weight, as after a move to another device."""
        self._cached, self._amax = None, None
        self._prepared.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> "LowBitLinear":
        super()._apply(fn, recurse)
        self.drop_cache()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "LowBitLinear":
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update({key: deepcopy(value, memo) for key, value in self.__getstate__().items()})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # what is derived from the weight is made again from the copy's own
        return {**self.__dict__, "_cached": None, "_amax": None, "_prepared": {}}


def autocast_input(x: Tensor) -> Tensor:
    """Return `x` in the autocast dtype of its device, as a plain linear layer would cast it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class QuantizedPrecision(PublishingPrecision):
    """Base of the plugins whose learner computes in the sampler's arithmetic.

    Batches, default dtype and log-probs stay as they are: Lightning's half-precision plugins cast a batch to bf16,
    which alone would add up to 0.03 nats of mismatch.

    Args:
        format: of the linear layers, in the learner and in what is published.
        exclude: globs over names of linear layers that stay as they are, beside embeddings, output and routers.
        autocast: run the other operations in bf16 over fp32 master weights; `none` leaves each in its own dtype.
    """

    layer_class: type[LowBitLinear]
    trains_format = True

    def __init__(
        self, format: NumberFormat, exclude: Sequence[str] = (), autocast: Literal["none", "bf16"] = "none"
    ) -> None:
        self.format, self.exclude, self.autocast = format, tuple(exclude), autocast
        self.clock = StepClock()
        self.report: SwapReport | None = None

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def convert_output(self, data: Any) -> Any:
        return data

    @override
    def forward_context(self) -> AbstractContextManager:
        if self.autocast == "none":
            return nullcontext()
        return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        network = network_of(module)
        if any(is_adapted(part) for part in network.modules()):
            raise ConfigError(
                f"{type(self).__name__} trains the weights themselves, but the policy has an adapter: what the sampler "
                "gets is the merged weight, which this forward pass never sees.",
                remedy="Leave model.policy.lora out, or use NVFP4LoRA with the format of the base.",
            )
        check_quantizable(network, self.format.name, self.exclude, "the plugin's exclude")
        chosen = quantizable_linears(network, self.exclude)
        check_shapes(self.format, chosen)
        clock, format, layer_class = self.clock, self.format, self.layer_class
        report = swap_linears(
            network,
            lambda name, linear: layer_class.from_linear(linear, name, format, clock),
            lambda name, linear: name in chosen,
        )
        layers = self.layers(module)
        for names in fused_groups(layers).values():
            group = tuple(layers[name] for name in names)
            for layer in group:
                layer.siblings = group
        if self.report is None:
            log.info("%s: %s, as %s", type(self).__name__, report, self.format.name)
        if report.swapped or self.report is None:
            self.report = report
        return module

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self.clock.ticks += 1
        return result

    def layers(self, module: nn.Module) -> dict[str, LowBitLinear]:
        """Return the low-bit layers of a module or a policy, by checkpoint name."""
        return {name: part for name, part in network_of(module).named_modules() if isinstance(part, LowBitLinear)}

    @override
    def source(
        self, policy: Any, format: NumberFormat | None, exclude: Sequence[str] = (), head: bool = False
    ) -> WeightSource:
        return LowBitSource(self, policy) if format == self.format else WeightSource(policy, format, exclude, head)


class LowBitSource(WeightSource):
    """Yields, for each low-bit layer, the very codes that its forward pass uses.

    A layer whose tensor a callback changed is quantized anew.

    Args:
        plugin: whose layers the policy has.
        policy: as `WeightSource` takes it.
    """

    aligned = True

    def __init__(self, plugin: QuantizedPrecision, policy: Any) -> None:
        super().__init__(policy, plugin.format, plugin.exclude)
        self.plugin = plugin

    @override
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {
            name: (layer.out_features, layer.in_features) for name, layer in self.plugin.layers(self.policy).items()
        }

    @override
    def held(self) -> Held:
        layers = self.plugin.layers(self.policy)

        def codes(name: str, tensor: Tensor) -> QuantizedWeight | None:
            layer = layers[name]
            return layer.quantized() if tensor.data_ptr() == layer.weight.data_ptr() else None

        return codes


def network_of(module: nn.Module) -> nn.Module:
    """Return the language model inside a LightningModule, a policy or a PEFT model, or the module itself."""
    policy = getattr(module, "policy", module)
    return getattr(policy, "network", policy)


def device_of(module: nn.Module) -> torch.device:
    """Return the device that the Trainer of a LightningModule puts it on; without a Trainer, where it is."""
    strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
    here = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return getattr(strategy, "root_device", here)


PLUGIN_EXCLUDE = "Exclude them with the plugin's `exclude` globs"


def check_shapes(
    format: NumberFormat, layers: Mapping[str, nn.Linear | tuple[int, int]], exclude: str = PLUGIN_EXCLUDE
) -> None:
    """Raise `ConfigError` naming the layers whose shape does not fit the format.

    Args:
        format: the number format.
        layers: linear layers, or their (out, in), by name.
        exclude: how they are left out, as the beginning of a sentence.
    """
    faults, expected = [], None
    for name, layer in layers.items():
        shape = (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else layer
        try:
            format.check(name, shape)
        except ConfigError as error:
            faults.append(f"{name} {shape}")
            expected = error.expected
    if not faults:
        return
    count = "1 layer does" if len(faults) == 1 else f"{len(faults)} layers do"
    smaller = ", choose a smaller group_size" if hasattr(format, "group_size") else ""
    raise ConfigError(
        f"{count} not fit {format.name}: {', '.join(faults[:4])}{' …' if len(faults) > 4 else ''}.",
        expected=expected,
        remedy=f"{exclude}{smaller}, or choose another format.",
    )
