"""What the precision plugins share: the Lightning plugin that swaps layers and publishes what they hold."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from typing_extensions import override

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, QuantizedWeight
from lit_qrl.network.experts import expert_stacks
from lit_qrl.network.linears import (
    check_quantizable,
    quantizable_layers,
    swap_linears,
)
from lit_qrl.network.names import is_adapted
from lit_qrl.network.stream import quantize_named
from lit_qrl.precision.layers.low_bit import (
    LowBitExperts,
    LowBitLinear,
    LowBitWeight,
    introduce_siblings,
)
from lit_qrl.precision.layers.together import LowBitTogether, reading_alike
from lit_qrl.precision.source import Change, Held, Named, WeightSource
from lit_qrl.run.description import Described

log = logging.getLogger(__name__)


class QuantizedPrecision(Described, Precision):
    """Base of the plugins whose learner computes in a number format, and which therefore say what is published.

    Batches, default dtype and log-probs stay as they are: Lightning's half-precision plugins cast a batch to bf16,
    which alone would add up to 0.03 nats of mismatch.

    Args:
        format: of the linear layers, in the learner and in what is published.
        exclude: globs over names of linear layers that stay as they are, beside embeddings, output and routers.
        autocast: run the other operations in bf16 over fp32 master weights; `none` leaves each in its own dtype.
    """

    arithmetic: Any = None
    """The low-bit layers' `Arithmetic`; None where the base is packed."""
    trains_format: bool = True
    """True when the forward pass multiplies the weights in the format, so that the quantized policy is what is trained,
    and what evaluations are of."""
    packs_base: bool = False
    """True when the base is frozen in the format, under an adapter that goes out beside it."""
    share_weights: bool = False
    """True when the learner gives its base up for the engine's."""

    def __init__(
        self, format: NumberFormat, exclude: Sequence[str] = (), autocast: Literal["none", "bf16"] = "none"
    ) -> None:
        self.format, self.exclude, self.autocast = format, tuple(exclude), autocast

    def check_policy(self, policy: Any) -> None:
        """Raise `ConfigError` for a policy that it cannot train, as far as that is known before weights are loaded."""
        if getattr(policy, "lora", None) is not None:
            raise self._over_adapter()

    def check_model(self, network: nn.Module, device: torch.device) -> None:
        """Raise `ConfigError` for a model whose layers it cannot hold, or not on the device, before weights are loaded.

        Args:
            network: the model; its weights need not be there.
            device: of the learner.
        """
        check_layers(network, self.format, self.exclude)

    def configure_policy(self, policy: Any) -> None:
        """Add or rename parameters of a policy that was just configured, before a checkpoint is restored."""

    def _over_adapter(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} trains the weights themselves, but the policy has an adapter: what the sampler "
            "gets is the merged weight, which this forward pass never sees.",
            remedy="Leave model.policy.lora out, or use NVFP4LoRA with the format of the base.",
        )

    @override
    def forward_context(self) -> AbstractContextManager:
        if self.autocast == "none":
            return nullcontext()
        return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        network = network_of(module)
        if any(is_adapted(part) for part in network.modules()):
            raise self._over_adapter()
        self.check_model(network, device_of(module))
        how = self.arithmetic
        swapped = swap_linears(network, lambda name, linear: LowBitLinear.from_linear(linear, name, how), self.exclude)
        for layer in self.layers(module).values():
            layer.take(how)  # another plugin's before, where it had put the layer in place
        linears = {name: layer for name, layer in self.layers(module).items() if isinstance(layer, LowBitLinear)}
        introduce_siblings(linears)
        for names in reading_alike(network, linears):
            group = tuple(linears[name] for name in names)
            if LowBitTogether.fits(group):
                together = LowBitTogether(group)
                for layer in group:
                    layer.together = together
        for name, stack in expert_stacks(network, self.exclude).items():
            plain = network.get_submodule(name)
            if not isinstance(plain, LowBitExperts):
                network.set_submodule(name, LowBitExperts(stack, plain, how))
        if swapped:
            log.info("%s: %d linear layers, as %s", type(self).__name__, len(swapped), self.format.name)
        return module

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.arithmetic is not None:
            self.arithmetic.finite.check()
        return super().optimizer_step(*args, **kwargs)

    def layers(self, module: nn.Module) -> dict[str, LowBitWeight]:
        """Return the low-bit layers of a module or a policy by checkpoint name, experts one by one."""
        found: dict[str, LowBitWeight] = {}
        for name, part in network_of(module).named_modules():
            if isinstance(part, LowBitLinear):
                found[name] = part
            elif isinstance(part, LowBitExperts):
                found |= part.weights
        return found

    def gather_in(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Convert a module of whose weights each process is to hold a part.

        Args:
            module: as `convert_module` takes it.
            dtype: in which a layer's weights are gathered, and of which the format is made, in a publish too.
        """
        if self.arithmetic is not None:
            self.arithmetic.gathered_in = dtype
        self.convert_module(module)

    def source(
        self, policy: Any, format: NumberFormat | None, exclude: Sequence[str] = (), head: bool = False
    ) -> WeightSource:
        """Return what a policy's publishes in any `format` are made of; the arguments are those of `WeightSource`."""
        if format is not None and format.numbers == self.format:
            return LowBitSource(self, policy, format)
        return WeightSource(policy, format, exclude, head)


class LowBitSource(WeightSource):
    """Yields, for each low-bit layer, the very codes that its forward pass uses.

    A layer whose tensor a callback changed is quantized anew.

    Args:
        plugin: whose layers the policy has.
        policy: as `WeightSource` takes it.
        format: of what goes out: the plugin's, or its numbers multiplied out.
    """

    aligned = True

    def __init__(self, plugin: QuantizedPrecision, policy: Any, format: NumberFormat) -> None:
        super().__init__(policy, format, plugin.exclude)
        self.plugin = plugin

    @cached_property
    @override
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {name: layer.shape for name, layer in self.plugin.layers(self.policy).items()}

    @override
    def whole(self, change: Change, dtype: torch.dtype | None) -> Named:
        low_bit: set[str] = set()
        for name, part in network_of(self.policy).named_modules():
            if isinstance(part, LowBitLinear | LowBitExperts):
                own = part.stack.parts if isinstance(part, LowBitExperts) else ("weight",)
                low_bit |= {f"{name}.{one}" for one in own}

        def as_computed(name: str, tensor: Tensor) -> Tensor:
            return change(name, tensor).to(self.plugin.arithmetic.gathered_in if name in low_bit else None)

        yield from super().whole(as_computed, dtype)
        self.plugin.arithmetic.finite.check()

    @override
    def held(self) -> Held:
        layers = self.plugin.layers(self.policy)

        def codes(name: str, tensor: Tensor) -> QuantizedWeight | None:
            layer = layers[name]
            # layers that share a scale are seen together by the stream alone
            if layer.arithmetic.gathered_in is not None:
                return None if self.plugin.format.shares_amax else quantize_named(self.plugin.format, name, tensor)
            if tensor.data_ptr() != layer.weight.data_ptr():
                return None
            # an engine may hold these very tensors: they are what the forward pass will multiply
            if layer.together is not None and layer.together.holds(tensor.device):
                layer.together.quantized()
            return layer.quantized()

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


PLUGIN_EXCLUDE = "the plugin's exclude"


def check_layers(
    network: nn.Module, format: NumberFormat, exclude: Sequence[str], where: str = PLUGIN_EXCLUDE, head: bool = False
) -> None:
    """Raise `ConfigError` where a format does not apply to a model, fits not all of its layers, or is left none.

    Args:
        network: the model; its weights need not be there.
        format: the number format.
        exclude: globs over names of layers that it leaves alone.
        where: the setting that holds them.
        head: it is applied to the output head too.
    """
    check_quantizable(network, format.name, exclude, where)
    check_shapes(format, quantizable_layers(network, exclude, head), where, exclude)


def check_shapes(
    format: NumberFormat,
    layers: Mapping[str, nn.Linear | tuple[int, int]],
    where: str = PLUGIN_EXCLUDE,
    exclude: Sequence[str] = (),
) -> None:
    """Raise `ConfigError` where there is no layer for a format, and naming those whose shape does not fit it.

    Args:
        format: the number format.
        layers: linear layers, or their (out, in), by name.
        where: the setting that leaves layers out.
        exclude: what it holds.
    """
    if not layers:
        raise ConfigError(
            f"No linear layer of the policy would be in {format.name}.",
            expected="at least one nn.Linear beside the output embedding and the routers",
            given=f"{where}: {', '.join(exclude)}" if exclude else "a model without nn.Linear",
            remedy=f"Correct {where}, or take a model made of nn.Linear layers.",
        )
    faults, expected = [], None
    for name, layer in layers.items():
        shape = (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else layer
        try:
            format.check(name, shape)
        except ConfigError as error:
            faults.append(f"{name} {shape}")
            expected = error.expected
    if faults:
        count = "1 layer does" if len(faults) == 1 else f"{len(faults)} layers do"
        smaller = getattr(format, "group_size", 0) > 32  # engines take 32, 64 and 128
        first = "Choose a smaller group_size (32 or 64), exclude" if smaller else "Exclude"
        raise ConfigError(
            f"{count} not fit {format.name}: {', '.join(faults[:4])}{' …' if len(faults) > 4 else ''}.",
            expected=expected,
            remedy=f"{first} them with globs in {where}, or choose another format.",
        )
