"""QeRL's learner: a frozen base packed in 4 or 8 bits under a LoRA adapter."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, QuantizedWeight
from lit_qrl.formats.support import lacking
from lit_qrl.network.experts import ExpertStack, expert_stacks
from lit_qrl.network.linears import fused_groups, quantizable_linears
from lit_qrl.network.names import base_of, checkpoint_modules, put_layer
from lit_qrl.network.quantized_linear import leave_to_each_rank
from lit_qrl.network.stacked import StackQuantizer
from lit_qrl.network.stream import Finite, quantize_named, shared_amax
from lit_qrl.precision.base import QuantizedPrecision, device_of, network_of
from lit_qrl.precision.deferred import DeferredWeights, deferred_weights
from lit_qrl.precision.layers.packed_experts import PackedExperts
from lit_qrl.precision.layers.packed_linear import PackedLinear, Product, moved
from lit_qrl.precision.packed_base import PackedBase, check_codes
from lit_qrl.precision.packed_source import PackedSource, fingerprint_of
from lit_qrl.precision.source import WeightSource
from lit_qrl.precision.vllm_kernels.kernels import Kernel, KernelChoice

log = logging.getLogger(__name__)


class PackedLoRA(QuantizedPrecision):
    """A frozen base in few bits under a trained adapter, as in QeRL (§3).

    The base is packed once, layer by layer, when the policy is configured; it gets no gradient, no optimizer state
    and no place in the checkpoint, which keeps a fingerprint of it instead. Weights of a weight-only format are
    multiplied out for each layer in the forward pass and again in the backward pass, never kept. A format of 8 bits
    multiplies as its sampler does, inputs quantized: y = Q(x) Q(W)ᵀ + s (x Aᵀ) Bᵀ; backward the rounding of x has the
    derivative 1, and the weight is multiplied out: dx = g Q(W) + s (g B) A.

    Args:
        format: a weight-only number format, such as `nvfp4`, `mxfp4`, `nf4` or `int4_group`, or one of 8 bits:
            `fp8_row`, `fp8_block`, `fp8_tensor` or `int8_channel`.
        exclude: globs over names of linear layers that stay as they are, beside embeddings, output and routers.
        autocast: run the other operations in bf16 over fp32 adapters; `none` leaves each in its own dtype.
        share_weights: hold the base once: after its publish the learner reads the engine's own tensors. Needs
            VLLMEngine on CUDA with `sleep_level: 0` and nvfp4; until then the codes wait in the host's memory.
        kernel: of the forward pass. `auto` takes the format's own arithmetic, that of the sampler's kernel where vLLM
            samples and has one; a weight-only format, and FP8 on a GPU without it, which is said, takes `dequantize`:
            each weight multiplied out, and inputs left alone.

    Raises:
        ConfigError: for a format that packs nothing, or of which no frozen base is held.
    """

    packs_base = True
    trains_format = False  # but base and adapter side by side

    def __init__(
        self,
        format: NumberFormat | str,
        exclude: Sequence[str] = (),
        autocast: Literal["none", "bf16"] = "none",
        share_weights: bool = False,
        kernel: Kernel = "auto",
    ) -> None:
        found = formats.get(format)
        if not found.packs:
            raise ConfigError(
                f"{type(self).__name__} holds a packed base, which {found.name} is not made for.",
                expected="weight-only format (nvfp4, mxfp4, nf4, int4_group), fp8_row, fp8_block, fp8_tensor, "
                "int8_channel",
                given=found,
                remedy="Use QATAligned for other formats that quantize activations.",
            )
        super().__init__(found, exclude, autocast)
        self.share_weights = share_weights
        self.choice = KernelChoice(kernel, found)
        self.fingerprint: str | None = None

    @property
    def product(self) -> Product:
        """How the layers multiply in the forward pass, on a device that knows the format."""
        return "format" if self.format.quantizes_activations and self.choice.kernel == "auto" else "dequantize"

    @override
    def check_policy(self, policy: Any) -> None:
        if getattr(policy, "lora", None) is None:
            raise ConfigError(
                f"{type(self).__name__} freezes the base, and the policy has nothing else to train.",
                expected="model.policy.lora, such as {class_path: peft.LoraConfig, init_args: {r: 32, lora_alpha: 64}}",
                given="none",
                remedy="Give the policy an adapter, or use QATAligned to train all weights.",
            )
        if getattr(policy, "packed_format", None) is not None:
            check_codes(policy.source, policy.packed_format, self.format, type(self).__name__)

    @override
    def check_model(self, network: nn.Module, device: torch.device) -> None:
        self._check_shared(network)
        super().check_model(network, device)

    def _check_shared(self, network: nn.Module) -> None:
        stacks = expert_stacks(network, self.exclude)
        if stacks and self.share_weights:
            raise ConfigError(
                f"{type(self).__name__} cannot share experts with the engine, whose layout of them is not known.",
                expected="share_weights: false, or a model without experts",
                given=f"share_weights: true with {next(iter(stacks))}",
                remedy="Set it to false.",
            )

    @override
    def configure_policy(self, policy: Any) -> None:
        """Pack the base of a configured policy in place; a second call changes nothing.

        Called from `configure_model`, before a checkpoint is restored.

        Raises:
            ConfigError: without an adapter, for shapes that do not fit, or when no layer matched.
        """
        self.check_policy(policy)
        network = network_of(policy)
        if self.packed(network):
            return
        base: PackedBase | None = getattr(policy, "packed_base", None)
        deferred: DeferredWeights | None = getattr(policy, "deferred", None)
        linears = {
            name: layer
            for name, layer in quantizable_linears(network, self.exclude).items()
            if not layer.weight.requires_grad  # a copy that is trained beside the adapter stays as it is
        }
        stacks = expert_stacks(network, self.exclude)
        if base is None:
            self.check_model(network, device_of(network))
        else:
            self._check_shared(network)
            experts = (name for stack in stacks.values() for name in stack.layers())
            held = base.select(self.format, self.exclude, {*linears, *experts}, type(self).__name__)
            linears = {name: linears[name] for name in linears if name in held}
            stacks = {name: stack for name, stack in stacks.items() if stack.within(held)}
        for names in fused_groups(linears).values():
            shared = None
            if base is None:
                if deferred is not None:
                    for name in names:
                        deferred.fill(linears[name])
                if self.format.shares_amax:
                    shared = shared_amax({name: linears[name].weight.detach() for name in names})
            for name in names:
                linear = linears.pop(name)
                weight = linear.weight.detach()
                if base is None:
                    q = self._quantized(name, weight, shared)
                else:
                    q = base.weight(name, (linear.out_features, linear.in_features), weight.device)
                self._place(network, name, linear, q)
        for name, stack in stacks.items():
            plain = network.get_submodule(name)
            if deferred is not None:
                deferred.fill(plain)
            self._pack_experts(network, stack, plain, base)
        if deferred is not None:
            deferred.fill_all()
            policy.deferred = None
        log.info("%s: %d linear layers, as %s", type(self).__name__, len(self.packed(network)), self.format.name)

    @override
    @contextmanager
    def module_init_context(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Leave random weights to be drawn layer by layer, so that the base never exists in full precision."""
        with deferred_weights():
            yield

    def _quantized(self, name: str, weight: Tensor, shared: Tensor | None) -> QuantizedWeight:
        home = weight.device
        # a weight waiting on the host is packed where that is fast, one layer at a time
        device = torch.device("cuda") if torch.cuda.is_available() else home
        return moved(quantize_named(self.format, name, weight.to(device), shared), home)

    def _quantized_stack(self, stack: ExpertStack, matrix: str, whole: Tensor) -> Iterator[tuple[str, QuantizedWeight]]:
        """Yield names and codes of the matrices that lie in one parameter, as many at a time as a launch takes."""
        home, device = whole.device, torch.device("cuda") if torch.cuda.is_available() else whole.device
        parts, finite = dict(stack.named(matrix, whole.to(device))), Finite()
        together = StackQuantizer(self.format)
        for names in fused_groups(parts).values():
            group = {name: parts[name] for name in names}
            made = together.of(group)
            if made is None:
                shared = shared_amax(group) if self.format.shares_amax and len(group) > 1 else None
                yield from ((name, self._quantized(name, part, shared)) for name, part in group.items())
                continue
            for name, one in zip(names, made, strict=True):
                finite.later(name, one.amaxes)
                yield name, one.weight if device == home else moved(one.weight, home)
        finite.check()

    def _pack_experts(
        self, network: nn.Module, stack: ExpertStack, plain: nn.Module, base: PackedBase | None = None
    ) -> None:
        """Put experts that are packed one by one, or lie so in a base's folder, in the place of a stack."""
        weights = {matrix: plain.get_parameter(matrix).detach() for matrix in stack.parts}
        device = next(iter(weights.values())).device
        apart = PackedExperts(stack, plain, lambda shape: self._empty(PackedLinear(self.format, shape, cache=False)))
        layers = {name: layer for name, layer in apart.named_modules() if isinstance(layer, PackedLinear)}
        if base is not None:
            for name, shape in stack.layers().items():
                layers[name.removeprefix(f"{stack.name}.")].set_weight(base.weight(name, shape, device))
        for matrix in stack.parts if base is None else ():
            for name, q in self._quantized_stack(stack, matrix, weights.pop(matrix)):
                layers[name.removeprefix(f"{stack.name}.")].set_weight(q)
        network.set_submodule(stack.name, apart)

    def _place(self, network: nn.Module, name: str, linear: nn.Linear, q: QuantizedWeight) -> None:
        packed = self._empty(PackedLinear.from_linear(linear, self.format, cache=False))
        packed.set_weight(q)
        if self.share_weights:
            packed.wait_on_host()
        put_layer(network, name, packed)

    def _empty(self, layer: Any) -> PackedLinear:
        """Return a layer that waits for its weight, told how to multiply."""
        layer.kernel = self.product
        return layer

    def packed(self, policy: Any) -> dict[str, PackedLinear]:
        """Return the packed layers of a policy or network by checkpoint name."""
        return {
            name: layer
            for name, module in checkpoint_modules(network_of(policy))
            if isinstance(layer := base_of(module), PackedLinear)
        }

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        layers = self.packed(module)
        if not layers:
            raise ConfigError(
                f"{type(self).__name__} found no packed base.",
                expected="a module that calls the plugin's configure_policy(policy) in configure_model",
                given=type(module).__name__,
            )
        self.fingerprint = fingerprint_of(layers)
        if self.product == "format":
            self._take_kernels(module, layers)
        leave_to_each_rank(module)
        return module

    def _take_kernels(self, module: nn.Module, layers: dict[str, PackedLinear]) -> None:
        """Let layers multiply as the run's sampler does, or by weights multiplied out on a GPU without FP8."""
        found = lacking(type(self).__name__, self.format, device_of(module), own=True)
        if found is not None:
            log.warning(
                "{what} Expected: {expected}. Given: {given}. The base is multiplied out and inputs are left alone, so "
                "that learner and sampler differ by the rounding of activations, for which configs/correction/ has "
                "corrections.".format(**found)
            )
        self.choice.follow(module)
        for name, layer in layers.items():
            layer.kernel = "dequantize" if found is not None else "format"
            layer.layer_name, layer.choice = name, self.choice

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"base": self.fingerprint}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # called after convert_module, so both fingerprints are known
        if state_dict.get("base") != self.fingerprint:
            raise ConfigError(
                "The checkpoint's adapter was trained over another base.",
                expected=f"a base with fingerprint {state_dict.get('base')}",
                given=self.fingerprint,
                remedy="Use the same model and the same format as that run.",
            )

    def check_base(self, policy: Any, checkpoint: Mapping[str, Any]) -> None:
        """Raise `ConfigError` when a policy's packed base is not the one that a checkpoint's adapter was trained over.

        Args:
            policy: that was configured.
            checkpoint: as `read_checkpoint` returns it.
        """
        self.fingerprint = fingerprint_of(self.packed(policy))
        self.load_state_dict(checkpoint[type(self).__qualname__])

    @override
    def source(
        self, policy: Any, format: NumberFormat | None, exclude: Sequence[str] = (), head: bool = False
    ) -> WeightSource:
        return PackedSource(self, policy, format, exclude, head)


class NVFP4LoRA(PackedLoRA):
    """`PackedLoRA` whose base is NVFP4 unless told otherwise (QeRL, §3).

    Args:
        format: any of those that `PackedLoRA` takes.
        **options: those of `PackedLoRA`.
    """

    def __init__(self, format: NumberFormat | str = "nvfp4", **options: Any) -> None:
        super().__init__(format, **options)
