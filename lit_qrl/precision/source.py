"""What a publish is made of: the learner's weights as streams."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, QuantizedWeight
from lit_qrl.formats.dense import Dense
from lit_qrl.network.adapters import base_weights
from lit_qrl.network.experts import ExpertStack, expert_stacks, unstacked
from lit_qrl.network.linears import quantizable_layers, quantizable_linears
from lit_qrl.network.names import kept_in_fp32
from lit_qrl.network.shards import whole
from lit_qrl.network.stream import weight_stream
from lit_qrl.precision.vllm_kernels.borrowed import WeightStore

Named = Iterator[tuple[str, Tensor]]
Change = Callable[[str, Tensor], Tensor]
"""What callbacks make of a tensor before it is quantized; one that they leave alone comes back itself."""
Held = Callable[[str, Tensor], QuantizedWeight | None]
"""From a layer's name and its tensor to the codes that the learner holds of it, or None where they must be made."""


def unchanged(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor: the `Change` of a publish that callbacks have no say in."""
    return tensor


class WeightSource:
    """Yields the tensors of one policy's publishes; this one is of a learner that computes in its own dtype.

    Args:
        policy: the learner's, with its Hugging Face model in `network`, `named_weights()` and `adapter_tensors()`.
        format: of the sampler's linear layers, or None.
        exclude: name patterns of layers that stay plain.
        head: publish the output head in the format too.
    """

    aligned: bool = False
    """True when the learner computes in the format itself, so that its own codes go out."""
    packed: bool = False
    """True when the learner's base exists in a format only, so that its sum with an adapter is another model."""

    def __init__(
        self, policy: Any, format: NumberFormat | None, exclude: Sequence[str] = (), head: bool = False
    ) -> None:
        self.policy, self.format, self.exclude, self.head = policy, format, tuple(exclude), head

    @cached_property  # a search of the whole model, which would take as long as a fifth of a publish
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every layer that goes out in the format, by checkpoint name."""
        network = self.policy.network
        if self.format is None or isinstance(self.format, Dense):  # experts go out as the learner has them, in one
            linears = quantizable_linears(network, self.exclude, self.head)
            return {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        return quantizable_layers(network, self.exclude, self.head)

    @cached_property
    def _stacks(self) -> dict[str, ExpertStack]:
        return expert_stacks(self.policy.network)

    def held(self) -> Held | None:
        """Return how codes that the learner holds are had, or None where all are made for the publish."""
        return None

    def whole(self, change: Change, dtype: torch.dtype | None) -> Named:
        """Yield the sampler's tensors, an adapter merged in, each passed through `change` before quantization."""
        named = ((name, change(name, tensor)) for name, tensor in self.policy.named_weights())
        return self._stream(named, self.format, list(self.shapes), dtype, self.held())

    def base(self, dtype: torch.dtype | None) -> Named:
        """Yield the base's tensors in the format, without the adapter."""
        return self._stream(base_weights(self.policy.network), self.format, list(self.shapes), dtype)

    def plain(self, dtype: torch.dtype | None) -> Named:
        """Yield the learner's weights in its own dtype, an adapter merged in."""
        return self._stream(self.policy.named_weights(), None, (), dtype)

    def _stream(self, named: Named, format: NumberFormat | None, layers: Collection[str], *more: Any) -> Named:
        if not isinstance(format, Dense):
            chosen = frozenset(layers)
            named = unstacked(named, {name: one for name, one in self._stacks.items() if one.within(chosen)})
        return weight_stream(named, format, layers, *more, kept=kept_in_fp32(self.policy.network))

    def adapter(self, dtype: torch.dtype | None) -> Named:
        """Yield the adapter's factors under PEFT's names."""
        for name, tensor in self.policy.adapter_tensors().items():
            yield name, tensor.detach().to(dtype)

    def changed_norms(self, change: Change) -> dict[str, Tensor]:
        """Return the base's tensors that `change` alters.

        Raises:
            ConfigError: for one that is no vector, since an unchanged base cannot take it.
        """
        found = {}
        for name, tensor in base_weights(self.policy.network, multiply_out=False):
            after = change(name, tensor)
            if after is not tensor:
                if tensor.ndim != 1:
                    raise ConfigError(
                        f"A callback changes {name}, but the base is published once.",
                        expected="changes of norms alone",
                        remedy="Set publisher.lora to merged.",
                    )
                found[name] = after
        return found

    def norms(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the learner's own tensors of these names."""
        return {name: whole(self.policy.network.get_parameter(name).detach()) for name in names}

    def base_state(self) -> tuple[Any, ...]:
        """Return a key that changes whenever a frozen tensor of the learner is written or replaced."""
        network = self.policy.network
        frozen = [p for p in network.parameters() if not p.requires_grad]
        return tuple((tensor.data_ptr(), tensor._version) for tensor in (*frozen, *network.buffers()))

    def plain_dtype(self, engine: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype of tensors outside the format's layers, or None for their own; `engine` is what it wants."""
        return engine or (self.format.dtype if isinstance(self.format, Dense) else None)

    def as_sampled(self) -> AbstractContextManager[None]:
        """Return a context in which the learner computes as the sampler of an aligned publish does."""
        return nullcontext()

    def settle(self, engine: WeightStore) -> None:
        """Let the learner read the base of an engine that just received it, where its plugin does so."""
