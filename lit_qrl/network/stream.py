"""From the learner's named weights to the tensors of a quantized checkpoint, layer by layer."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError, IncompleteError, within_memory
from lit_qrl.formats.base import NumberFormat, QuantizedWeight
from lit_qrl.formats.dense import Dense
from lit_qrl.formats.numerics import UNPUBLISHED, magnitude, not_finite, postponed_checks, require_finite
from lit_qrl.network.linears import fused_groups
from lit_qrl.network.stacked import REMEDY as QUANTIZER_REMEDY
from lit_qrl.network.stacked import StackQuantizer

_WEIGHT = ".weight"


def weight_stream(
    named: Iterable[tuple[str, Tensor]],
    format: NumberFormat | None,
    quantizable: Collection[str],
    dtype: torch.dtype | None = None,
    quantized: Callable[[str, Tensor], QuantizedWeight | None] | None = None,
    kept: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield checkpoint names and tensors of a stream of weights, the given layers in `format`.

    The weights of layers that engines fuse come out together, with one scale where the format shares it; no more
    than the fused layers still incomplete are held, which is one when the stream is in the model's order, and of
    matrices that are slices of one stack, such as a layer's experts, those that one launch quantizes.

    Args:
        named: checkpoint names and tensors of the plain model.
        format: of the quantizable layers; None quantizes nothing.
        quantizable: names of layers, without `.weight`.
        dtype: what floating tensors outside these layers are cast to, and inside them where the format's scales have
            the weight's dtype; None leaves them, and with a dense format takes that format's dtype.
        quantized: from a layer's name and its tensor to codes that exist already, or None where they must be made.
        kept: names of tensors that are never cast; see `kept_in_fp32`.

    Raises:
        ConfigError: for a weight with NaN or inf that is quantized, whose codes would not show it, or a shape that does
            not fit. On an accelerator a NaN shows at the end of the stream, so that the host waits for it once.
        IncompleteError: for a fused layer with a part missing.
    """
    plain = None
    if isinstance(format, Dense):
        dtype = dtype or format.dtype
        plain = format if format.numbers is format and quantized is None else None  # else its weights are of codes
    groups = fused_groups(quantizable if format is not None else ())
    fused = {layer: key for key, layers in groups.items() for layer in layers}
    cast = dtype if format is not None and format.scales_like_weight else None
    waiting: dict[str, dict[str, Tensor]] = {}
    seen: set[str] = set()
    finite, stacked = Finite(), None if format is None else StackQuantizer(format, cast)
    for name, tensor in named:
        layer = name.removesuffix(_WEIGHT)
        key = fused.get(layer)
        tensor = tensor.detach() if tensor.requires_grad else tensor  # a slice that says so stays one
        weight = key is not None and name.endswith(_WEIGHT)
        if weight:
            seen.add(layer)
        if format is None or key is None or not weight or plain:
            to = plain.dtype if plain and weight else None if name in kept else dtype
            yield name, tensor.to(dtype=to if tensor.is_floating_point() else None)  # its receipt says if it is finite
            continue
        parts = waiting.setdefault(key, {})
        parts[layer] = tensor
        if len(parts) == len(groups[key]):
            yield from _quantized(waiting.pop(key), format, quantized, finite, stacked, cast)
    missing = sorted(fused.keys() - seen)
    if missing:
        held = f", while {', '.join(sorted(waiting))} waited for them" if waiting else ""
        raise IncompleteError(
            f"The stream of weights is incomplete. Expected: a weight for {', '.join(missing)}. "
            f"Given: none{held}. Send every layer of the model in one publish."
        )
    finite.check()


class Finite:
    """Refuses NaN and inf in what is quantized: at once on a CPU, all in one transfer on an accelerator.

    Args:
        fault: what is said of a tensor with such a number.
    """

    def __init__(self, fault: str = UNPUBLISHED) -> None:
        self._kept: list[tuple[str, Tensor]] = []
        self._fault = fault

    @contextmanager
    def of(self, layer: str) -> Iterator[None]:
        """Check what is quantized within."""
        kept: list[Tensor] = []
        with postponed_checks(kept):
            yield
        self.later(layer, [amax.amax() for amax in kept])

    def later(self, layer: str, amaxes: Iterable[Tensor]) -> None:
        """Check numbers of an accelerator with all others."""
        self._kept += [(f"{layer}{_WEIGHT}", amax) for amax in amaxes]

    def check(self) -> None:
        """Wait for the device if anything is kept; raise `ConfigError` naming the first tensor that is not finite."""
        waiting, self._kept = self._kept, []
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, (_, value) in enumerate(waiting):
            kinds.setdefault((value.device, value.dtype), []).append(index)
        bad: list[int] = []
        for members in kinds.values():  # of a kind, so that no number is a launch of its own
            good = torch.stack([waiting[i][1] for i in members]).isfinite().tolist()
            bad += [index for index, finite in zip(members, good, strict=True) if not finite]
        if bad:
            raise not_finite(waiting[min(bad)][0], self._fault)


def _named(layer: str, error: ValueError) -> ValueError:
    """Return the error with the parameter's name before it."""
    if isinstance(error, ConfigError):
        what = f"{layer}{_WEIGHT}: {error.what}"
        return ConfigError(what, expected=error.expected, given=error.given, remedy=error.remedy)
    return ValueError(f"{layer}{_WEIGHT}: {error}")


def _quantized(
    parts: dict[str, Tensor],
    format: NumberFormat,
    existing: Callable[[str, Tensor], QuantizedWeight | None] | None,
    finite: Finite,
    stacked: StackQuantizer | None,
    cast: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    made = {layer: None if existing is None else existing(layer, tensor) for layer, tensor in parts.items()}
    shared = None
    if any(q is None for q in made.values()):
        # one part that must be quantized anew changes the scale that all of a fused layer share
        if format.shares_amax:
            made = dict.fromkeys(made)
        for layer, tensor in parts.items():
            format.check(layer, (tensor.shape[0], tensor.shape[1]))
        if stacked is not None and not any(made.values()) and (together := stacked.of(parts)) is not None:
            for layer, one in zip(parts, together, strict=True):
                finite.later(layer, one.amaxes)
                yield from format.export(one.weight, layer)
            return
        if format.shares_amax and len(parts) > 1:
            with postponed_checks([]):  # each part is checked below, under its own name
                shared = shared_amax(parts)
    for layer in list(parts):
        tensor, q = parts.pop(layer), made.pop(layer)
        if q is None:
            with finite.of(layer):
                q = quantize_named(format, layer, tensor if cast is None else tensor.to(cast), shared)
        elif cast is not None and q.scales is not None:
            q = replace(q, scales=q.scales.to(cast))
        yield from format.export(q, layer)


def quantize_named(format: NumberFormat, layer: str, weight: Tensor, shared: Tensor | None = None) -> QuantizedWeight:
    """Return `format.quantize(weight, shared)`; an error names the parameter."""
    size = weight.numel() * weight.element_size() / 2**30
    try:
        with within_memory(f"quantizing {layer}{_WEIGHT} ({size:.2f} GiB) to {format.name}", QUANTIZER_REMEDY):
            return format.quantize(weight.contiguous(), shared)  # an expert's may be a view that is turned
    except ValueError as error:
        raise _named(layer, error) from None


def shared_amax(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the largest magnitude over the weights of one fused layer; refuse a weight that is not finite.

    Args:
        parts: layer names and weights.

    >>> shared_amax({"q_proj": torch.tensor([[1.0]]), "k_proj": torch.tensor([[-3.0]])}).item()
    3.0
    """
    amaxes = []
    for layer, tensor in parts.items():
        amax = magnitude(tensor)
        try:
            require_finite(amax)
        except ValueError as error:
            raise _named(layer, error) from None
        amaxes.append(amax)
    return torch.stack([amax.to(amaxes[0].device) for amax in amaxes]).amax()
