"""What a packed base and its adapter are published as, and the digest that tells one base from another."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from typing_extensions import override

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.adapters import base_weights, merged_weights
from lit_qrl.network.names import checkpoint_name, is_adapter
from lit_qrl.precision.base import network_of
from lit_qrl.precision.layers.packed_linear import PackedLinear, Product
from lit_qrl.precision.source import Named, WeightSource
from lit_qrl.precision.vllm_kernels.borrowed import WeightStore, borrow

log = logging.getLogger(__name__)


class PackedSource(WeightSource):
    """Yields a packed base as it is held, its adapter beside it; in another format, the sum of the two.

    Args:
        plugin: a `PackedLoRA`, which packed the policy.
        policy: as `WeightSource` takes it.
        format: of the sampler's linear layers.
        exclude: name patterns of layers that stay plain, in another format than the plugin's.
        head: publish the output head in the format too, in another format than the plugin's.
    """

    packed = True

    def __init__(
        self, plugin: Any, policy: Any, format: NumberFormat | None, exclude: Sequence[str], head: bool
    ) -> None:
        super().__init__(policy, format, exclude, head)
        self.plugin, self.aligned = plugin, format is not None and format.numbers == plugin.format

    @cached_property
    @override
    def shapes(self) -> dict[str, tuple[int, int]]:
        packed = {name: layer.shape for name, layer in self.plugin.packed(self.policy).items()}
        return packed if self.aligned else {**packed, **super().shapes}

    @override
    def base(self, dtype: torch.dtype | None) -> Named:
        """Yield the base's tensors, the packed layers as they are held.

        Raises:
            ConfigError: for a shared base that the engine has damaged.
        """
        if not self.aligned:
            return super().base(dtype)
        layers, expected = self.plugin.packed(self.policy), self.plugin.fingerprint
        if any(layer.stored is not None for layer in layers.values()) and fingerprint_of(layers) != expected:
            raise ConfigError(
                "The base that learner and engine share is damaged, and there is no other copy to publish.",
                expected=f"fingerprint {expected}",
                remedy="Start again from the last checkpoint.",
            )
        device = next(network_of(self.policy).parameters()).device
        named = base_weights(network_of(self.policy), multiply_out=False)
        return self._stream(named, self.format, list(layers), dtype, lambda name, _: layers[name].weight_on(device))

    @override
    def plain(self, dtype: torch.dtype | None) -> Named:
        network = network_of(self.policy)
        return self._stream(merged_weights(network, next(network.parameters()).dtype), None, (), dtype)

    @override
    @contextmanager
    def as_sampled(self) -> Iterator[None]:
        before: dict[PackedLinear, Product] = {one: one.kernel for one in self.plugin.packed(self.policy).values()}
        for layer in before if self.plugin.format.quantizes_activations else ():
            layer.kernel = "format"
        try:
            yield
        finally:
            for layer, kernel in before.items():
                layer.kernel = kernel

    @override
    def settle(self, engine: WeightStore) -> None:
        """Share the base with the engine that just received it, where the plugin's `share_weights` asks for that.

        Raises:
            ConfigError: when the engine holds a layer in a layout that is not known.
        """
        if not (self.plugin.share_weights and self.aligned):
            return
        plain = {
            checkpoint_name(name): parameter
            for name, parameter in network_of(self.policy).named_parameters()
            # vectors stay apart: a callback may perturb the engine's norms
            if parameter.ndim == 2 and not parameter.requires_grad and not is_adapter(name)
        }
        layers = self.plugin.packed(self.policy)
        taken = borrow(layers, plain, engine)
        log.info("%s: %d weights are the engine's own", type(self.plugin).__name__, len(taken))


def fingerprint_of(layers: dict[str, PackedLinear]) -> str:
    """Return a short digest of names, shapes and sampled codes of a packed base: equal for equal bases."""
    digest = blake2b(digest_size=8)
    for name, layer in layers.items():
        q = layer.weight
        flat = q.codes.flatten()
        # 64 codes spread over each layer tell two models apart without copying gigabytes to the host
        sample = flat[:: max(flat.numel() // 64, 1)][:64].contiguous().view(torch.uint8)
        digest.update(f"{name} {_as_saved(q.format)} {q.shape}".encode() + bytes(sample.tolist()))
    return digest.hexdigest()


def _as_saved(format: NumberFormat) -> str:
    """Return a format as the digests in checkpoints have it.

    >>> from lit_qrl.formats import get
    >>> _as_saved(get("int4_group")), _as_saved(get("fp8_row"))
    ('int4_group (group_size 128)', 'fp8_row')
    """
    settings = {one.name: getattr(format, one.name) for one in fields(format)} if is_dataclass(format) else {}
    on = {name: value for name, value in settings.items() if value is not None and value is not False}
    shown = ", ".join(name if value is True else f"{name} {value}" for name, value in on.items())
    return f"{format.name} ({shown})" if shown else format.name
