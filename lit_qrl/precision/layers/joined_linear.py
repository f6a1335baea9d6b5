"""Plain linear layers that read one input and are multiplied together."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from typing_extensions import override

from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.scaled import Scaled
from lit_qrl.functional._gradients import added, weight_gradients
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.precision.layers.together import Together, end_to_end, reading_alike, side_by_side

ROWS = 1024
"""Tokens from which on it is less work: the weights of keys and values are copied for it."""

ALONE = ("o_proj", "down_proj")
"""Layers that no other reads the input of; their gradients too are added up by the product."""

LAID = ("q_proj", "k_proj", "v_proj")
"""Layers whose weights a sampler on a GPU copies into one."""


class _Joined(torch.autograd.Function):
    """Products of one input; the first layers' weights may be laid one below another for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], whole: bool, recipe: Any, *own: Tensor) -> Any:
        count, rows = len(sizes), x.reshape(-1, x.shape[-1])
        weights, biases = own[:count], own[count:]
        # the parameters themselves, whose gradients may be there: what is saved may come back as other tensors
        ctx.own, ctx.whole, ctx.shape = own, whole, x.shape
        ctx.again = recipe is not None
        ctx.save_for_backward(*((rows,) if recipe is None else recipe), *weights)
        shape = x.shape[:-1]
        if whole:
            out = _product(rows, torch.cat(weights), end_to_end(biases, x.dtype)).view(*shape, -1)
            return tuple(torch.unsafe_split_with_sizes(out, list(sizes), -1))
        made = (_product(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        # no views in autograd's eyes: a model may add to them in place
        return tuple(torch.ops.aten._unsafe_view(one, [*shape, one.shape[-1]]) for one in made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count, saved = len(ctx.own) // 2, ctx.saved_tensors  # once: a layer that is computed again gives them once
        kept, weights = saved[:-count], list(saved[-count:])
        needs = [any(ctx.needs_input_grad[start : start + size]) for start, size in ((0, 1), (4, count))]
        needs.append(any(ctx.needs_input_grad[4 + count :]))
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        groups = [list(range(count))] if ctx.whole else [[number] for number in range(count)]
        if ctx.whole:
            flat, weights = [side_by_side(flat)], [torch.cat(weights)]
        grad_x, of_weights, of_biases = None, [None] * count, [None] * count
        if needs[0]:
            grad_x = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
            grad_x = grad_x.view(ctx.shape)
        if needs[1]:
            rows = _normed(*kept) if ctx.again else kept[0]
            of_weights = [
                one
                for grad, group in zip(flat, groups, strict=True)
                for one in weight_gradients([ctx.own[number] for number in group], grad, rows)
            ]
        if needs[2]:
            of_biases = [
                one
                for grad, group in zip(flat, groups, strict=True)
                for one in added([ctx.own[count + number] for number in group], grad.sum(dim=0))
            ]
        return grad_x, None, None, None, *of_weights, *of_biases


def _normed(h: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    from lit_qrl.formats.kernels import tiles_triton

    rows = h.reshape(-1, h.shape[-1])
    return tiles_triton.tiles(rows, False, False, tiles_triton.NORM, rstd=rstd, weight=weight)[0]


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())


class _Plain(Together):
    @property
    def whole(self) -> bool:
        """Whether the weights are copied for one product: where keys and values are few, which GEMMs alone are slow."""
        return len(self.sizes) == 3 and sum(self.sizes) < 2 * self.sizes[0]

    @override
    def takes(self, x: Tensor) -> bool:
        if not super().takes(x) or not dispatch.available(x, "joined") or torch.is_autocast_enabled(x.device.type):
            return False
        if x.dtype not in (torch.bfloat16, torch.float16) or x.numel() < ROWS * x.shape[-1]:
            return False
        return all(one.weight.dtype == x.dtype and not isinstance(one.weight, DTensor) for one in self.layers)

    @override
    def compute(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        found = dispatch.kept(x, dispatch.RECIPE)
        return _Joined.apply(x, self.sizes, self.whole, found and found.along, *weights, *biases)  # pyright: ignore


class _Laid(Together):
    """Layers that are not trained, and whose weights are parts of one from then on."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(layers)
        self.weight = torch.cat([layer.weight for layer in layers])
        self.bias = end_to_end([layer.bias for layer in layers], self.weight.dtype)
        for name, whole in (("weight", self.weight), ("bias", self.bias)):
            for layer, part in zip(self.layers, () if whole is None else whole.split(self.sizes), strict=False):
                layer._parameters[name] = nn.Parameter(part, requires_grad=False)

    @override
    def takes(self, x: Tensor) -> bool:
        return super().takes(x) and x.dtype == self.weight.dtype and not torch.is_autocast_enabled(x.device.type)

    @override
    def compute(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return F.linear(x, self.weight, self.bias).split(self.sizes, -1)


class _LaidCodes(Together):
    """A sampler's layers of codes that are parts of one weight from then on, for products of few rows.

    A layer that no other reads the input of is one by itself.
    """

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        super().__init__(layers)
        first, made = layers[0], [layer.weight for layer in layers]
        scales = [q.scales for q in made if q.scales is not None]
        whole = side_by_side([q.codes for q in made], dim=0), side_by_side(scales, dim=0)
        parts = whole[0].split(self.sizes), whole[1].split([len(one) for one in scales])
        for layer, codes, scale in zip(layers, *parts, strict=True):
            layer.set_weight(QuantizedWeight(codes, scale, None, layer.format, layer.shape))
        self.format: Any = first.format
        self.codes_of = self.format.codes_of
        shape = (sum(self.sizes), first.in_features)
        self.prepared = self.format.prepare(QuantizedWeight(*whole, None, self.format, shape), torch.bfloat16)
        self.bias = end_to_end([layer.bias for layer in layers], torch.float32)

    @staticmethod
    def fits(layers: Sequence[Any]) -> bool:
        """Return whether the device multiplies their codes, and no scale of theirs is another layer's too."""
        first = layers[0]
        format, rows = first.format, first.format.rows_together
        if not isinstance(format, Scaled) or rows is None or any(one.codes is None for one in layers):
            return False
        alike = {(one.format, one.in_features, one.bias is None) for one in layers}
        fitting = all(one.out_features % rows == 0 and format.has_gemm(one.codes.device, one.shape) for one in layers)
        return len(alike) == 1 and fitting

    @override
    def compute(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        assert self.prepared.scale is not None
        out = self.format.multiply_few(x, self.prepared.operand, self.prepared.scale, self.bias)
        return out.view(*x.shape[:-1], -1).split(self.sizes, -1)


class JoinedLinear(nn.Linear):
    """A linear layer whose product is made with those of the layers that read the same input."""

    together: Together | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return `x @ W.T + b`: "... in" -> "... out"."""
        if self.together is not None and self.together.takes(input):
            return self.together.output(self, input)
        return super().forward(input)


def join_linears(network: nn.Module) -> None:
    """Let plain linear layers that read one input be multiplied together, in place.

    Names and parameters stay; a plugin that puts other layers in their place finds linear layers.

    Args:
        network: a causal language model.
    """
    plain = _plain_linears(network)
    together = reading_alike(network, plain)
    alone = [[name] for name in plain if together and name.rpartition(".")[2] in ALONE]
    _join([[plain[name] for name in names] for names in together + alone], _Plain)


def lay_linears(network: nn.Module) -> None:
    """Let queries, keys and values be one product of one weight, in place; theirs are parts of it from then on.

    A product of few rows takes as long for the few outputs of keys as for those of queries. The copy is 5 to 10 % of a
    model; gate and up, half of it, gain little. Codes are the sampler's own, so that those of gate and up are laid too.

    Args:
        network: a causal language model that is not trained; a second call is for new weights.
    """
    plain = _plain_linears(network)
    groups = [[plain[name] for name in names] for names in reading_alike(network, plain) if names[0].endswith(LAID)]
    _join([one for one in groups if len(one) == len(LAID)], _Laid)
    coded = {name: module for name, module in network.named_modules() if isinstance(module, QuantizedLinear)}
    alike = reading_alike(network, coded)
    alone = [[name] for name in coded.keys() - {name for names in alike for name in names}]
    for layers in ([coded[name] for name in names] for names in alike + alone):
        if _LaidCodes.fits(layers):
            group = _LaidCodes(layers)
            for layer in layers:
                layer.together = group


def _plain_linears(network: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in network.named_modules() if type(module) in (nn.Linear, JoinedLinear)}


def _join(groups: Sequence[Sequence[Any]], kind: type[Together]) -> None:
    for layers in groups:
        if len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}) == 1:
            group = kind(layers)
            for layer in layers:
                layer.__class__ = JoinedLinear
                layer.together = group
