"""The embedded sampler's own modules, and how a stream of published tensors becomes their weights."""

import copy
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn import functional as F

from lit_qrl.errors import nearest
from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.experts import ExpertList, ExpertStack, expert_stacks
from lit_qrl.network.names import kept_in_fp32
from lit_qrl.network.padding_free import ATTENTION
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.precision.layers.joined_linear import lay_linears
from lit_qrl.precision.layers.one_pass import hand_on_codes
from lit_qrl.receipts.ledger import ReceivedLedger, RefusedError
from lit_qrl.rollout.adapter import PREFIX, A, B, factors, scaling
from lit_qrl.rollout.embedded.attention import FOLDED
from lit_qrl.run.description import plain_class

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


def skeleton(network: Any, device: torch.device) -> Any:
    """Return a model of the same class and config whose parameters hold no memory yet; its buffers do.

    Args:
        network: the learner's Hugging Face model.
        device: of the buffers.
    """
    kind: Any = plain_class(network)
    config = copy.deepcopy(network.config)
    with init_empty_weights(include_buffers=False):
        attention = config.get_text_config()._attn_implementation
        attention = "sdpa" if attention == ATTENTION else attention  # what it had before `enable_padding_free`
        if attention == "sdpa" and getattr(kind, "_supports_attention_backend", False):  # takes those of the registry
            attention = FOLDED
        built = kind._from_config(config, attn_implementation=attention)
    built.tie_weights()  # each parameter was replaced by an empty one of its own
    for module in built.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return built.eval().requires_grad_(False)


class Modules:
    """The sampler's modules by checkpoint name; layers change between plain and quantized as the stream says.

    Args:
        network: a model from `skeleton`.
        device: where the weights go.

    Attributes:
        joins: whether the weights of queries, keys and values are laid one below another, for one product.
    """

    def __init__(self, network: Any, device: torch.device) -> None:
        self.network, self.device, self.joins = network, device, False
        owners: dict[int, str] = {}
        self.aliases: dict[str, list[str]] = {}
        for name, parameter in network.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(owners.setdefault(id(parameter), name), []).append(name)
        self.shapes = {name: tuple(network.get_parameter(name).shape) for name in self.aliases}
        self.linears = {name for name, module in network.named_modules() if isinstance(module, nn.Linear)}
        self.stacks = expert_stacks(network)
        self.experts: dict[str, ExpertStack] = {}
        for stack in self.stacks.values():
            for layer, shape in stack.layers().items():
                self.experts[layer], self.shapes[f"{layer}.weight"] = stack, shape
        self.kept = kept_in_fp32(network)
        self.buffers = set(network.state_dict()) - {name for names in self.aliases.values() for name in names}

    @property
    def expected(self) -> set[str]:
        """Names of all tensors of the plain model; a tied weight counts once."""
        return set(self.aliases) | self.buffers

    def expected_with(self, arrived: Collection[str]) -> set[str]:
        """Return `expected` with the matrices of those experts of which any `arrived` in place of their stack."""
        names = self.expected
        for stack in {id(one): one for layer, one in self.experts.items() if f"{layer}.weight" in arrived}.values():
            names -= {f"{stack.name}.{matrix}" for matrix in stack.parts}
            names |= {f"{layer}.weight" for layer in stack.layers()}
        return names

    def held(self, name: str) -> Tensor | None:
        """Return the tensor that the modules hold under a checkpoint name, or None."""
        layer, _, suffix = name.rpartition(".")
        module = self.network.get_submodule(layer)
        if isinstance(module, QuantizedLinear) and suffix != "bias":
            held = dict(module.format.export(module.weight, layer)) if module.codes is not None else {}
            return held.get(name)
        found = getattr(module, suffix, None)
        return found.detach() if isinstance(found, Tensor) else None

    def set_plain(self, name: str, tensor: Tensor) -> None:
        """Make `tensor` itself the parameter or buffer of that name, and of the names tied to it."""
        if name in self.buffers:
            layer, _, suffix = name.rpartition(".")
            self.network.get_submodule(layer)._buffers[suffix] = tensor.clone()
            return
        parameter = nn.Parameter(tensor, requires_grad=False)
        for alias in self.aliases[name]:
            layer, _, suffix = alias.rpartition(".")
            module = self.network.get_submodule(layer)
            if isinstance(module, ExpertList) and suffix in module.stack.parts:
                module = module.plain
                self.network.set_submodule(layer, module)
            if isinstance(module, QuantizedLinear) and suffix == "weight":
                linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
                linear._parameters["bias"] = module.bias
                self.network.set_submodule(layer, linear.eval())
                module = linear
            module._parameters[suffix] = parameter

    def set_quantized(self, layer: str, tensors: dict[str, Tensor], format: NumberFormat, cache: bool) -> None:
        """Give a layer, or a matrix of one expert, its codes and scales, keyed by suffix."""
        if layer in self.experts:
            self._take_apart(self.experts[layer], format, cache)
        module: Any = self.network.get_submodule(layer)
        if not (isinstance(module, QuantizedLinear) and module.format == format):
            module = QuantizedLinear(format, self.shapes[f"{layer}.weight"], module.bias, cache)
            self.network.set_submodule(layer, module)
        try:
            module.load({suffix: tensor.to(self.device) for suffix, tensor in tensors.items()})
        except KeyError as error:
            raise RefusedError(
                f"{layer} arrived without {error.args[0]}. Expected: all tensors of a {format.name} layer together. "
                f"Given: {', '.join(sorted(tensors))}."
            ) from None

    def _take_apart(self, stack: ExpertStack, format: NumberFormat, cache: bool) -> None:
        """Hold experts one by one, in a format."""
        module: Any = self.network.get_submodule(stack.name)
        if isinstance(module, ExpertList):
            return
        apart = ExpertList(stack, module, lambda shape: QuantizedLinear(format, shape, cache=cache))
        self.network.set_submodule(stack.name, apart)


class Loader:
    """Takes one publish, tensor by tensor.

    Args:
        modules: the sampler's.
        format: of the quantized layers, or None.
        version: of the publish.
        dtype: what plain tensors are cast to, or None.
        owned: storages of the learner's own weights, by address.
        share: let the sampler hold the learner's own tensors instead of copies.
        cache: let quantized layers keep their prepared operands.
    """

    def __init__(
        self,
        modules: Modules,
        format: NumberFormat | None,
        version: int,
        dtype: torch.dtype | None,
        owned: Iterable[int],
        share: bool,
        cache: bool,
    ) -> None:
        self.modules, self.format, self.dtype = modules, format, dtype
        self.owned, self.share, self.cache = set(owned), share, cache
        self.received = ReceivedLedger(version)
        self.borrowed: list[tuple[Tensor, int]] = []
        self.layers: dict[str, str] = {}
        self.bytes = 0
        self._names: dict[str, None] = {}
        self._open: tuple[str, dict[str, Tensor]] = ("", {})

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Consume the stream; the sampler's weights are whole only when this returns.

        Raises:
            RefusedError: for a tensor that is unknown, comes twice, has the wrong shape, or is missing.
        """
        for name, tensor in tensors:
            self._take(name, tensor)
        self._close()
        expected = self.modules.expected_with(self.layers)
        missing = sorted(expected - set(self.layers))
        if missing:
            raise RefusedError(
                f"The publish is incomplete: {len(missing)} of {len(expected)} tensors are missing. "
                f"Expected: {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}. "
                "The sampler is unusable until a whole publish arrives."
            )
        if self.modules.joins:
            lay_linears(self.modules.network)
            hand_on_codes(self.modules.network)
        for name in self._names:
            held = self.modules.held(name)
            if held is not None:
                self.received.record(name, held)

    def _take(self, name: str, tensor: Tensor) -> None:
        if name in self._names:
            raise RefusedError(f"{name} was published twice in one stream. Send every tensor once.")
        self._names[name] = None
        self.bytes += tensor.numel() * tensor.element_size()
        layer, _, suffix = name.rpartition(".")
        if layer != self._open[0]:
            self._close()
        modules = self.modules
        quantizable = layer in modules.linears or layer in modules.experts
        codes = quantizable and tensor.dtype not in DTYPE_NAMES
        if name in modules.buffers or (name in modules.aliases and not codes):
            self._plain(name, tensor)
        elif quantizable and self.format is not None:
            self._open = (layer, self._open[1])
            self._open[1][suffix] = tensor
        elif not any(name in names for names in modules.aliases.values()):
            raise RefusedError(f"The sampler has no tensor named {name}. {nearest(name, sorted(modules.expected))}")

    def _plain(self, name: str, tensor: Tensor) -> None:
        shape = self.modules.shapes.get(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise RefusedError(f"{name} does not fit. Expected: shape {shape}. Given: {tuple(tensor.shape)}.")
        given = tensor.detach()
        cast = given.is_floating_point() and name not in self.modules.kept
        tensor = given.to(device=self.modules.device, dtype=self.dtype if cast else None)
        if tensor.untyped_storage().data_ptr() in self.owned:
            if self.share:
                self.borrowed.append((tensor, tensor._version))
            else:
                tensor = tensor.clone()
        self.modules.set_plain(name, tensor)
        self.layers[name] = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))

    def _close(self) -> None:
        layer, tensors = self._open
        self._open = ("", {})
        if tensors:
            assert self.format is not None
            self.modules.set_quantized(layer, tensors, self.format, self.cache)
            self.layers[f"{layer}.weight"] = self.format.name


class LowRankTerm:
    """A forward hook that adds `x Aᵀ Bᵀ · scale` to a linear layer's output, as the learner's layer does.

    Factors are lowered to an input of 16 bits, and the product that makes the term adds it. In fp32 PEFT's formula is
    computed, which differs by the order of additions.

    Args:
        a: "rank in".
        b: "out rank".
        scale: the adapter's α / rank (or its root).
    """

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        self.a, self.b, self.scale = a, b, scale
        self._factors: dict[torch.dtype, tuple[Tensor, Tensor]] = {a.dtype: (a, b)}

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the layer's output with the term added, in the output's dtype."""
        x = autocast_input(args[0])
        dtype = x.dtype if x.element_size() < self.a.element_size() else self.a.dtype
        if dtype not in self._factors:
            self._factors[dtype] = self.a.to(dtype), self.b.to(dtype)
        a, b = self._factors[dtype]
        down = F.linear(x.to(dtype), a)
        if output.dtype != dtype or dtype == torch.float32:
            return (output + F.linear(down, b) * self.scale).to(output.dtype)
        output.view(-1, len(b)).addmm_(down.view(-1, len(a)), b.t(), alpha=self.scale)
        return output


class EmbeddedAdapter:
    """The one adapter of an embedded sampler.

    Args:
        modules: the sampler's.
        config: the policy's PEFT config.
    """

    def __init__(self, modules: Modules, config: Any) -> None:
        self.modules, self.config = modules, config
        self._hooks: list[Any] = []

    @torch.no_grad()
    def load(self, tensors: Iterator[tuple[str, Tensor]], received: ReceivedLedger) -> None:
        """Replace the adapter by copies of `tensors` and write into `received` what the layers hold.

        Args:
            tensors: under PEFT's names.
            received: the engine's ledger.

        Raises:
            PublishError: when one of a layer's two factors is missing; the old adapter stays.
            RefusedError: for a tensor that is no factor of a linear layer, or of another shape.
        """
        given = factors(tensors, received)
        foreign = [layer for layer in given if layer not in self.modules.linears]
        if foreign:
            raise RefusedError(
                f"The sampler has no linear layer for {foreign[0]}. Expected: {PREFIX}<layer>{A} and {B}. "
                "Restrict lora.target_modules to linear layers, or set publisher.lora to merged."
            )
        terms = {layer: self._term(layer, *pair) for layer, pair in given.items()}
        self.remove()
        for layer, term in terms.items():
            module: Any = self.modules.network.get_submodule(layer)
            self._hooks.append(module.register_forward_hook(term))
            for end, held in ((A, term.a), (B, term.b)):
                received.record(f"{PREFIX}{layer}{end}", held)

    def _term(self, layer: str, a: Tensor, b: Tensor) -> LowRankTerm:
        module = self.modules.network.get_submodule(layer)
        assert isinstance(module, nn.Linear | QuantizedLinear)
        a, b = (one.detach().to(self.modules.device, copy=True) for one in (a, b))
        if a.shape != (b.shape[1], module.in_features) or b.shape[0] != module.out_features:
            raise RefusedError(
                f"The adapter of {layer} does not fit. Expected: A (rank, {module.in_features}) and "
                f"B ({module.out_features}, rank). Given: {tuple(a.shape)} and {tuple(b.shape)}."
            )
        return LowRankTerm(a, b, scaling(self.config, layer, a.shape[0]))

    def remove(self) -> None:
        """Take the adapter off: the layers compute with the base alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
