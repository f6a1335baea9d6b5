"""Calibration sequences through a model whose layers are in memory one at a time, and their AWQ scaling."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.expert_list import ExpertList
from lit_qrl.network.linears import fused_groups
from lit_qrl.network.routing import routers
from lit_qrl.network.structure import ROW_PAIRS, body, decoder_layers
from lit_qrl.quantize.awq import Found, InputStatistics, fold, search

# A fold that a model does not allow changes a layer's update by its own size; rounding to bf16 changes it by 1 %.
_TOLERANCE = 0.05
_NONE: Mapping[str, ExpertList] = MappingProxyType({})


class _Stop(Exception):  # noqa: N818 - no error: it ends a forward pass early
    pass


def calibration_sequences(
    encode: Callable[[str], Sequence[int]], texts: Iterable[str], count: int, length: int, separator: int | None
) -> Tensor:
    """Return `count` sequences of `length` tokens, "count length": the texts one after another, cut.

    Args:
        encode: from a text to token ids.
        texts: the calibration texts.
        count: sequences.
        length: tokens of each.
        separator: token between texts, or None.

    Raises:
        ConfigError: when the texts do not hold so many tokens.

    >>> calibration_sequences(lambda text: [int(c) for c in text], ["123", "4567"], 2, 3, 0).tolist()
    [[1, 2, 3], [0, 4, 5]]
    """
    ids: list[int] = []
    for text in texts:
        ids += [*encode(text), *([] if separator is None else [separator])]
        if len(ids) >= count * length:
            return torch.tensor(ids[: count * length]).view(count, length)
    raise ConfigError(
        "The calibration text is too short.",
        expected=f"{count} sequences of {length} tokens",
        given=f"{len(ids)} tokens, enough for {len(ids) // length} sequences",
        remedy="Lower --calibration_samples or --calibration_tokens, or give more text.",
    )


class LayerRunner:
    """Carries the calibration sequences from layer to layer; `hidden` is the next layer's input.

    Args:
        network: the model; what lies before its decoder layers must hold weights, the rest may lie on `meta`.
        sequences: token ids "count length".
        device: where a layer computes; hidden states wait on the host.
    """

    def __init__(self, network: Any, sequences: Tensor, device: torch.device) -> None:
        self.device = device
        self.hidden: list[Tensor] = []
        self._arguments: list[dict[str, Any]] = []
        _, layers = decoder_layers(network)
        plain = [layer.forward for layer in layers]

        def recorder(index: int) -> Callable[..., Tensor]:
            def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                # every sequence is as long as the first, so positions and masks are the same
                if len(self._arguments) == index:
                    self._arguments.append(kwargs)
                if index == 0:
                    self.hidden.append(hidden_states.cpu())
                if index + 1 == len(layers) or (index == 0 and len(self.hidden) > 1):
                    raise _Stop
                return hidden_states

            return forward

        try:
            for index, layer in enumerate(layers):
                layer.forward = recorder(index)  # pyright: ignore[reportAttributeAccessIssue]
            for row in sequences:
                try:
                    body(network)(input_ids=row[None].to(device), use_cache=False)
                except _Stop:
                    continue
        finally:
            for layer, forward in zip(layers, plain, strict=True):
                layer.forward = forward  # pyright: ignore[reportAttributeAccessIssue]

    def run(self, layer: nn.Module, index: int, hidden: Tensor) -> Tensor:
        """Return a decoder layer's output "1 length hidden" for an input of that shape."""
        out = layer(hidden.to(self.device), **self._arguments[index])
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def scale(
        self, layer: nn.Module, index: int, name: str, format: NumberFormat, chosen: Collection[str]
    ) -> list[Found]:
        """Scale the channels of one decoder layer for `format`, in place, and carry the sequences past it.

        Args:
            layer: with its weights.
            index: its number.
            name: its name in the model.
            format: the weight-only format.
            chosen: names of the layers that will be rounded.

        Raises:
            ConfigError: when the scaled layer computes something else than before.
        """
        linears = {child: part for child, part in layer.named_modules() if isinstance(part, nn.Linear)}
        experts = {child: part for child, part in layer.named_modules() if isinstance(part, ExpertList)}
        # a router that is no linear layer reads what its experts read
        readers = {**{router.name: router.module for router in routers(layer)}, **linears}
        inputs, producers = self._statistics(layer, index, readers, experts)
        first = self.hidden[0]
        self.hidden = [self.run(layer, index, hidden).cpu() for hidden in self.hidden]
        before = self.hidden[0].to(self.device)
        found: list[Found] = []

        def settle(producer: str, consumers: Sequence[str], statistics: InputStatistics) -> None:
            wanted = [child for child in consumers if f"{name}.{child}" in chosen]
            if not wanted:
                return
            groups = fused_groups(wanted).values()
            weights = [[linears[child].weight for child in group] for group in groups]
            alpha, scales, loss, plain = search(format, weights, statistics)
            found.append(Found(tuple(f"{name}.{c}" for c in wanted), f"{name}.{producer}", alpha, loss, plain))
            if alpha > 0:
                fold(layer.get_submodule(producer), [readers[child] for child in consumers], scales)

        # rows first: they change weights that the norms' search then looks at
        for producer, consumer in _row_pairs(linears, experts):
            if consumer in inputs:  # no token of the calibration may have come to an expert
                settle(producer, [consumer], inputs[consumer])
        for producer, consumers in producers.items():
            apart = [child for one in consumers for child in (_first(one, experts[one]) if one in experts else [one])]
            settle(producer, apart, inputs[consumers[0]])
        after = self.run(layer, index, first)
        update = (before.float() - first.to(self.device).float()).norm()
        change = float((after.float() - before.float()).norm() / update.clamp(min=torch.finfo(torch.float32).tiny))
        if not change < _TOLERANCE:
            raise ConfigError(
                f"AWQ scaling does not fit {name}: the scaled layer's update differs by {change:.0%} from the plain "
                "one's, so something else reads what was scaled.",
                expected="a decoder whose norms feed linear layers alone, such as Llama's or Qwen's",
                remedy="Quantize without --awq.",
            )
        return found

    def _statistics(
        self, layer: nn.Module, index: int, readers: dict[str, nn.Module], experts: dict[str, ExpertList]
    ) -> tuple[dict[str, InputStatistics], dict[str, list[str]]]:
        """Return the statistics of what layers and experts read, and for each norm those that read its output.

        Which share an input is seen from the tensor itself, so no architecture has to be known by name.
        """
        by_input: dict[str, InputStatistics] = {}
        producers: dict[str, list[str]] = {}
        seen: dict[tuple[int, int], tuple[Tensor, str]] = {}
        outputs: dict[tuple[int, int], tuple[Tensor, str]] = {}

        def produced(producer: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                if isinstance(output, Tensor):
                    outputs[_memory(output)] = (output, producer)

            return hook

        def consumed(child: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                x, key = args[0], _memory(args[0])
                if key not in seen:
                    seen[key] = (x, child)
                    by_input.setdefault(child, InputStatistics()).add(x)
                else:
                    by_input.setdefault(child, by_input[seen[key][1]])
                if key in outputs:
                    consumers = producers.setdefault(outputs[key][1], [])
                    if child not in consumers:
                        consumers.append(child)

            return hook

        within = {child for name, held in experts.items() for child in _first(name, held)}
        looked_at = {**{child: part for child, part in readers.items() if child not in within}, **experts}
        hooks = [module.register_forward_pre_hook(consumed(child)) for child, module in looked_at.items()]
        for child, module in layer.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 1:
                hooks.append(module.register_forward_hook(produced(child)))
        try:
            for hidden in self.hidden:
                seen.clear()
                outputs.clear()
                self.run(layer, index, hidden)
        finally:
            for hook in hooks:
                hook.remove()
        return by_input, producers


def _memory(x: Tensor) -> tuple[int, int]:
    """Return what a tensor and another view of the same numbers have in common."""
    return x.data_ptr(), x.numel()


def _first(name: str, experts: ExpertList) -> list[str]:
    """Return the names of the matrices of all experts that read the layer's tokens."""
    leaves = next(iter(experts.stack.parts.values()))
    return [f"{name}.{expert}.{leaf}" for expert in range(experts.stack.count) for leaf in leaves]


def _row_pairs(linears: dict[str, nn.Linear], experts: Mapping[str, ExpertList] = _NONE) -> list[tuple[str, str]]:
    """Return (producer, consumer) for v → o and up → down where the shapes allow: no value head is shared.

    Args:
        linears: of one decoder layer.
        experts: among them, whose matrices have names of their own.
    """
    pairs = []
    for name, held in experts.items():
        (*gate, up), (down,) = held.stack.parts.values()
        pairs += [(f"{name}.{e}.{up}", f"{name}.{e}.{down}") for e in range(held.stack.count) if gate]
    linears = {child: part for child, part in linears.items() if not child.startswith(tuple(f"{n}." for n in experts))}
    for producer, consumer, sibling in ROW_PAIRS:
        for child, linear in linears.items():
            parent, _, leaf = child.rpartition(".")
            other, third = (f"{parent}.{part}" if parent else part for part in (consumer, sibling))
            fits = leaf == producer and other in linears and third in linears
            if fits and linear.out_features == linears[other].in_features:
                pairs.append((child, other))
    return pairs
