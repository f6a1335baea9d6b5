"""Weights of the learner that are also held in a number format: linear layers, and experts in a stack."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import override

from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.experts import ExpertStack, experts_output, one_after_another
from lit_qrl.network.grouped import can_group, grouped_product
from lit_qrl.network.linears import fused_groups
from lit_qrl.network.stream import Finite, quantize_named


class Steps:
    """Counts the steps of all optimizers: some write parameters in a way that no version counter sees."""

    taken = 0

    @classmethod
    def count(cls, *_: Any) -> None:
        """Count one more, as a hook of the optimizers."""
        cls.taken += 1


register_optimizer_step_post_hook(Steps.count)


class Arithmetic(ABC):
    """How all layers of a plugin multiply in its format, forth and back.

    Args:
        format: of the weights.
    """

    gathered_in: torch.dtype | None = None
    """Dtype of weights while their layers compute, where each process holds a part of them in between; else None."""
    groups = False
    """True where a product is that of the input and the prepared operand, which one grouped GEMM can have of all."""
    joins = True
    """True where layers that read one input may be multiplied as one weight."""
    reads_codes_alone = False
    """True where layers read the codes that the operator before leaves with their input, and not the input."""

    def __init__(self, format: NumberFormat) -> None:
        self.format = format
        self.finite = Finite("holds NaN or inf and cannot be quantized.")

    @abstractmethod
    def multiply(self, x: Tensor, held: "LowBitCodes", sizes: Sequence[int], *own: Tensor | None) -> Any:
        """Return `x @ W.T + b` as the codes have it, with gradients: "... in" -> "... out", or one for each layer.

        Args:
            x: in the dtype that is multiplied in.
            held: the codes.
            sizes: rows of each layer.
            *own: the learner's own weights, through which their gradients flow, then their biases " out", or None.
        """

    def backward_weight(self, held: "LowBitCodes", weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the output's gradient is multiplied by for that of the input."""
        raise NotImplementedError


class LowBitCodes:
    """Codes that follow a weight of the learner, and what products make of them: both anew after each update.

    Subclasses say whose codes they are.
    """

    layer_name: str
    arithmetic: Arithmetic
    out_features: int
    in_features: int
    _prepared: dict[Any, Any]

    @property
    def format(self) -> NumberFormat:
        """The number format."""
        return self.arithmetic.format

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight."""
        return self.out_features, self.in_features

    def quantized(self) -> QuantizedWeight:
        """Return the codes and scales of today's weight; where they are new, nothing is left in `_prepared`."""
        raise NotImplementedError

    def derived(self, key: Any, make: Callable[[QuantizedWeight], Any]) -> Any:
        """Return what `make` makes of the codes, made once per version of them under that key."""
        q = self.quantized()
        if key not in self._prepared:
            with torch.inference_mode(False), torch.no_grad():
                self._prepared[key] = make(q)
        return self._prepared[key]

    def prepared(self, dtype: torch.dtype) -> PreparedWeight:
        """Return the operand of the format's GEMM for inputs of `dtype`, made once per version of the weight."""
        return self.derived(dtype, lambda q: self.format.prepare(q, dtype))

    def used(self) -> None:
        """Forget what was derived from a weight that is gathered for one pass alone."""


class LowBitWeight(LowBitCodes):
    """A weight of the learner that is also held in a number format.

    What is derived from it is no buffer, so a checkpoint of the plain model fits. Subclasses say where the weight is.
    """

    weight: Any
    siblings: tuple["LowBitWeight", ...]
    together: Any = None
    """The `Together` of the layers that read the same input, where their product is one."""
    _cached: tuple[Any, QuantizedWeight] | None
    _amax: tuple[Any, Tensor] | None

    def begin(self, name: str, arithmetic: Arithmetic) -> None:
        """Set what every low-bit weight has; it stands alone until it is told its siblings."""
        self.layer_name, self.arithmetic = name, arithmetic
        self.siblings = (self,)
        object.__setattr__(self, "_prepared", {})
        self.drop_cache()

    def take(self, arithmetic: Arithmetic) -> None:
        """Multiply by that arithmetic from now on."""
        if self.arithmetic is not arithmetic:
            self.arithmetic, self.together = arithmetic, None
            self.drop_cache()

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ W.T + b` as the low-bit weight has it, with gradients; the arguments are those of `multiply`."""
        return self.arithmetic.multiply(x, self, (self.out_features,), weight, bias)

    def _weight_version(self) -> tuple[int, int, int]:
        # Optimizers and checkpoints write in place, which raises the version; a replaced tensor has another address.
        weight = self.weight
        return weight._version, weight.data_ptr(), Steps.taken

    @override
    def quantized(self) -> QuantizedWeight:
        shares = self.format.shares_amax and len(self.siblings) > 1
        key = tuple(part._weight_version() for part in self.siblings) if shares else self._weight_version()
        if self._cached is None or self._cached[0] != key:
            # not an inference tensor, even when a validation comes first: the next training step reuses it
            # weights of a GPU are found not to be finite before the next step or publish: the host need not wait here
            with torch.inference_mode(False), torch.no_grad(), self.arithmetic.finite.of(self.layer_name):
                shared = torch.stack([part._own_amax() for part in self.siblings]).amax() if shares else None
                self._cached = (key, quantize_named(self.format, self.layer_name, self.weight, shared))
            self._prepared.clear()
        return self._cached[1]

    def _own_amax(self) -> Tensor:
        key = self._weight_version()
        if self._amax is None or self._amax[0] != key:
            self._amax = (key, self.weight.detach().abs().amax())
        return self._amax[1]

    @override
    def used(self) -> None:
        if self.arithmetic.gathered_in is not None:  # beside the parts nothing whole stays
            self.drop_cache()
            for part in self.siblings:
                part._amax = None

    def drop_cache(self) -> None:
        """Forget the low-bit weight, as after a move to another device."""
        self._cached, self._amax = None, None
        self._prepared.clear()

    def __getstate__(self) -> dict[str, Any]:
        # what is derived from the weight is made again from the copy's own
        return {**self.__dict__, "_cached": None, "_amax": None, "_prepared": {}}


def introduce_siblings(weights: Mapping[str, LowBitWeight]) -> None:
    """Tell weights that engines hold as one, by their names, of one another: they share a scale where a format does."""
    for names in fused_groups(weights).values():
        group = tuple(weights[name] for name in names)
        for weight in group:
            weight.siblings = group


class LowBitLinear(LowBitWeight, nn.Linear):
    """A linear layer with a low-bit weight; parameters keep their names, shapes and dtypes."""

    is_swapped = True

    @classmethod
    def from_linear(cls, linear: nn.Linear, name: str, arithmetic: Arithmetic) -> "LowBitLinear":
        """Return the layer that takes the place of `linear` and owns its parameters."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.train(linear.training)
        layer.begin(name, arithmetic)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Return `x @ W.T + b` in the format's arithmetic: "... in" -> "... out"."""
        x, group = autocast_input(input), self.together
        if group is not None and x is input and group.takes(x):
            return group.output(self, x)
        return self.compute(x, self.weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> "LowBitLinear":
        super()._apply(fn, recurse)
        self.drop_cache()
        return self


class LowBitExpert(LowBitWeight):
    """One matrix of one expert: a slice of the stack that the learner trains."""

    def __init__(self, stack: "LowBitExperts", matrix: str, expert: int, leaf: int, shape: tuple[int, int]) -> None:
        self._stack, self._where = stack, (matrix, expert, leaf)
        self.out_features, self.in_features = shape

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The slice "out in", a view of what the stack holds now."""
        matrix, expert, leaf = self._where
        held = self._stack.get_parameter(matrix).detach()
        return self._stack.stack.parts_of(matrix, held[expert])[leaf]


class LowBitExperts(nn.Module):
    """Stacked experts with low-bit weights; it holds their parameters under the names that they had.

    Args:
        stack: how they lie.
        plain: the family's own module.
        arithmetic: the plugin's.
    """

    is_swapped = True

    def __init__(self, stack: ExpertStack, plain: nn.Module, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.stack = stack
        self._parameters.update(plain._parameters)
        # no submodule: its activation is wanted, and its parameters are here
        self._plain = (plain,)
        plain._parameters = {}
        self.weights: dict[str, LowBitExpert] = {}
        for matrix in stack.parts:
            each = len(stack.parts[matrix])
            for index, (name, shape) in enumerate(stack.layers(matrix).items()):
                weight = LowBitExpert(self, matrix, index // each, index % each, shape)
                weight.begin(name, arithmetic)
                self.weights[name] = weight
        introduce_siblings(self.weights)
        self.train(plain.training)

    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Return what the experts make of their tokens; the arguments are those of `experts_output`."""
        stack, how = self.stack, next(iter(self.weights.values())).arithmetic
        if chosen is not None and how.groups and can_group(stack, autocast_input(hidden_states)):
            return experts_output(stack, self, self._multiply_all, hidden_states, chosen, weights)
        held = {matrix: self.get_parameter(matrix).unbind(0) for matrix in stack.parts}

        def multiply(expert: int, matrix: str, rows: Tensor) -> list[Tensor]:
            return [
                self.weights[f"{stack.name}.{expert}.{leaf}"].compute(autocast_input(rows), weight, None)
                for leaf, weight in zip(stack.parts[matrix], stack.parts_of(matrix, held[matrix][expert]), strict=True)
            ]

        return experts_output(stack, self, one_after_another(multiply), hidden_states, chosen, weights)

    def _multiply_all(self, matrix: str, rows: Tensor, ends: Tensor) -> list[Tensor]:
        """Return the products of rows sorted by expert with each matrix of theirs that lies in a parameter."""
        stack, leaves, rows = self.stack, self.stack.parts[matrix], autocast_input(rows)
        learned = stack.parts_of(matrix, self.get_parameter(matrix))
        made = []
        for leaf, weight in zip(leaves, learned, strict=True):
            own = weight.detach()
            held = [self.weights[f"{stack.name}.{expert}.{leaf}"] for expert in range(stack.count)]

            def operand(held: Any = held) -> Tensor:
                return torch.stack([one.prepared(rows.dtype).operand for one in held])

            def backward(held: Any = held, own: Tensor = own) -> Tensor:
                pairs = zip(held, own.unbind(0), strict=True)
                return torch.stack([one.arithmetic.backward_weight(one, part, rows.dtype) for one, part in pairs])

            made.append(grouped_product(rows, ends, operand, weight, backward))
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> "LowBitExperts":
        super()._apply(fn, recurse)
        for weight in self.weights.values():
            weight.drop_cache()
        return self
