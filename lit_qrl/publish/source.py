"""What a publish sends: the learner's weights as one stream, in the rollout format, merged or beside their base."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.network.adapters import base_weights
from lit_qrl.network.head import check_head
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.stream import weight_stream
from lit_qrl.precision.base import QuantizedPrecision, check_shapes
from lit_qrl.precision.packed_lora import PackedLoRA

Named = Iterable[tuple[str, Tensor]]
Change = Callable[[str, Tensor], Tensor]


class WeightSource:
    """Yields what one policy's publishes are made of.

    Args:
        policy: the learner's.
        plugin: the Trainer's precision plugin.
        format: of the sampler's linear layers, or None.
        exclude: name patterns of layers that stay plain, where the plugin does not say.
        head: publish the output head in the format too.
    """

    def __init__(
        self, policy: Any, plugin: Any, format: NumberFormat | None, exclude: Sequence[str] = (), head: bool = False
    ) -> None:
        self.policy, self.format, self.exclude, self.head = policy, format, tuple(exclude), head
        ours = plugin if isinstance(plugin, QuantizedPrecision) else None
        self.plugin = ours
        self.aligned = ours if ours is not None and ours.format == format else None
        self.packed = isinstance(ours, PackedLoRA)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every layer that goes out in the format, by checkpoint name."""
        if self.aligned is not None:
            return self.aligned.shapes(self.policy)
        linears = quantizable_linears(self.policy.network, self.exclude, self.head)
        shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        return {**(self.plugin.shapes(self.policy) if self.packed and self.plugin else {}), **shapes}

    def check(self) -> None:
        """Raise `ConfigError` where the format applies to no layer, or does not fit one.

        The layers of a plugin with the same format have been checked by it.
        """
        if self.format is None or isinstance(self.format, Dense) or self.aligned is not None:
            return
        if self.head:
            check_head(self.policy.network)
        shapes = self.shapes()
        if not shapes:
            raise ConfigError(
                f"No linear layer of the policy would be published in {self.format.name}.",
                expected="at least one nn.Linear beside the output embedding and the routers",
                given=f"publisher.exclude: {', '.join(self.exclude)}" if self.exclude else "a model without nn.Linear",
                remedy="Correct publisher.exclude, or set publisher.format to bf16.",
            )
        check_shapes(self.format, shapes, "Exclude them with globs in publisher.exclude")

    def whole(self, change: Change, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the sampler's tensors, an adapter merged in, each passed through `change` before quantization."""
        if self.aligned is not None and not self.packed:
            return self.aligned.export(self.policy, _changed(self.aligned.weights(self.policy), change), dtype)
        named = _changed(self.policy.named_weights(), change)
        return weight_stream(named, self.format, list(self.shapes()), dtype)

    def base(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's tensors in the format, without the adapter."""
        if self.aligned is not None:
            return self.aligned.export(self.policy, self.aligned.weights(self.policy), dtype)
        return weight_stream(base_weights(self.policy.network), self.format, list(self.shapes()), dtype)

    def settle(self, engine: Any) -> tuple[Any, ...]:
        """Let a plugin share the base with the engine that just received it; return the state of the base after it."""
        if isinstance(self.plugin, PackedLoRA) and self.aligned is not None:
            self.plugin.settle(self.policy, engine)
        return self.base_state()

    def plain(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the learner's weights in its own dtype, an adapter merged in."""
        named = self.policy.named_weights() if self.plugin is None else self.plugin.plain_weights(self.policy)
        return weight_stream(named, None, (), dtype)

    def adapter(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's factors under PEFT's names."""
        for name, tensor in self.policy.adapter_tensors().items():
            yield name, tensor.detach().to(dtype)

    def changed_norms(self, change: Change) -> dict[str, Tensor]:
        """Return the base's tensors that `change` alters.

        Raises:
            ConfigError: for one that is no vector, since an unchanged base cannot take it.
        """
        named = self.plugin.weights(self.policy) if self.plugin is not None else base_weights(self.policy.network)
        found = {}
        for name, tensor in named:
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
        return {name: self.policy.network.get_parameter(name).detach() for name in names}

    def base_state(self) -> tuple[Any, ...]:
        """Return a key that changes whenever a frozen tensor of the learner is written or replaced."""
        network = self.policy.network
        frozen = [p for p in network.parameters() if not p.requires_grad]
        return tuple((tensor.data_ptr(), tensor._version) for tensor in (*frozen, *network.buffers()))

    def plain_dtype(self, engine: Any) -> torch.dtype | None:
        """Return the dtype in which tensors outside the format's layers go out, or None for their own."""
        return engine.plain_dtype or (self.format.dtype if isinstance(self.format, Dense) else None)


def _changed(named: Named, change: Change) -> Iterator[tuple[str, Tensor]]:
    return ((name, change(name, tensor)) for name, tensor in named)
