"""Which linear layers are quantized, which of them the engines fuse, and how a layer is swapped in place."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight

# The last part of a layer's name: heads write logits, routers choose experts, adapters are trained in full precision;
# an error of 4 or 8 bits there costs far more than the memory it saves.
_KEPT = frozenset({"lm_head", "embed_out", "output_embedding", "score", "router", "gate", "shared_expert_gate"})
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
# Projections that engines multiply as one matrix.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
}


def fused_group(name: str) -> str:
    """Return the name of the fused layer that `name` becomes part of in an engine, or `name` itself.

    >>> fused_group("model.layers.0.self_attn.k_proj"), fused_group("model.layers.0.mlp.down_proj")
    ('model.layers.0.self_attn.qkv_proj', 'model.layers.0.mlp.down_proj')
    """
    parent, _, leaf = name.removesuffix(".base_layer").rpartition(".")
    fused = _FUSED.get(leaf)
    return name if fused is None else f"{parent}.{fused}" if parent else fused


def fused_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Return for every fused layer the names among `names` that it is made of, in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(fused_group(name), []).append(name)
    return groups


def quantizable_linears(root: nn.Module, exclude: Collection[str] = (), head: bool = False) -> dict[str, nn.Linear]:
    """Return the linear layers that a format applies to, by name.

    Every `nn.Linear` but the output embedding, routers and gates of experts, adapters, and what `exclude` names.

    Args:
        root: the model.
        exclude: globs over layer names, such as `*.down_proj` or `model.layers.0.*`.
        head: take the output embedding too.

    >>> model = nn.ModuleDict({"up_proj": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2)})
    >>> list(quantizable_linears(model))
    ['up_proj']
    """
    output = _output_embedding(root)
    return {
        name: module
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear)
        and name
        and (head and not _excluded(name, exclude) if module is output else not _kept(name, exclude))
    }


def _kept(name: str, exclude: Collection[str]) -> bool:
    name = name.removesuffix(".base_layer")  # an adapter stands around it; globs mean the checkpoint's names
    parts = name.split(".")
    if parts[-1] in _KEPT or any(part in _ADAPTERS for part in parts):
        return True
    return _excluded(name, exclude)


def _excluded(name: str, exclude: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in exclude)


def _output_embedding(root: nn.Module) -> nn.Module | None:
    get: Any = getattr(root, "get_output_embeddings", None)
    return None if get is None else get()


@dataclass(frozen=True)
class SwapReport:
    """What a swap did.

    Args:
        swapped: names of the layers that were replaced.
        present: names of the layers that had been replaced before.
        skipped: names of the linear layers that were left alone.
    """

    swapped: tuple[str, ...]
    present: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        kept = f"; left alone: {', '.join(self.skipped)}" if self.skipped else ""
        return f"{len(self.swapped) + len(self.present)} linear layers swapped{kept}"


def swap_linears(
    root: nn.Module,
    factory: Callable[[str, nn.Linear], nn.Module],
    filter_fn: Callable[[str, nn.Linear], bool] | None = None,
) -> SwapReport:
    """Replace linear layers by what `factory` makes of them, and return which.

    A second call does nothing: only layers of exactly the class `nn.Linear` are replaced, and the new ones must be
    of another. A layer that is reachable by two names is replaced once, in both places.

    Args:
        root: the model; its own children are changed.
        factory: from name and layer to the new module, which keeps the layer's parameters under their names.
        filter_fn: from name and layer to True where the layer is to be swapped; `quantizable_linears` by default.

    Raises:
        ConfigError: if no layer matched.
    """
    if filter_fn is None:
        chosen = quantizable_linears(root)
        filter_fn = lambda name, module: name in chosen  # noqa: E731
    linears = [(name, m) for name, m in root.named_modules() if isinstance(m, nn.Linear) and name]
    replaced: dict[int, nn.Module] = {}
    swapped, present, skipped = [], [], []
    for name, module in linears:
        if not filter_fn(name, module):
            skipped.append(name)
        elif type(module) is not nn.Linear:
            present.append(name)
        else:
            replaced[id(module)] = factory(name, module)
            swapped.append(name)
    already = any(getattr(module, "is_swapped", False) for module in root.modules())
    if not swapped and not present and not already:
        raise ConfigError(
            "No linear layer of the policy matched, so nothing would be quantized.",
            expected="at least one nn.Linear beside the output embedding and the routers",
            given=f"{len(linears)} linear layers, all excluded" if linears else "a model without nn.Linear",
            remedy="Correct the plugin's `exclude` globs, or use a model made of nn.Linear layers.",
        )
    for parent in list(root.modules()):
        # not `named_children`, which leaves out the second name of a shared layer
        for child_name, child in list(parent._modules.items()):
            if id(child) in replaced:
                setattr(parent, child_name, replaced[id(child)])
    return SwapReport(tuple(swapped), tuple(present), tuple(skipped))


def leave_to_each_rank(module: nn.Module) -> None:
    """Keep DDP from sending the weights of quantized layers around: before every forward pass, and FP8 not at all.

    Each rank makes them of the same weights.

    Args:
        module: what DDP will wrap.
    """
    root: Any = module
    ignored = set(getattr(root, "_ddp_params_and_buffers_to_ignore", ()))
    for name, part in module.named_modules():
        if isinstance(part, QuantizedLinear):
            ignored |= {f"{name}.{buffer}" for buffer in part._buffers}
    root._ddp_params_and_buffers_to_ignore = sorted(ignored)


class QuantizedLinear(nn.Module):
    """A linear layer of a sampler: it holds codes and scales, and has no parameter but its bias.

    Args:
        format: the number format.
        shape: (out, in) of the weight.
        bias: the bias " out", or None.
        cache: keep what `format.prepare` makes of the codes between calls; it costs its memory and saves its time.
    """

    is_swapped = True
    codes: Tensor | None
    scales: Tensor | None
    global_scale: Tensor | None

    def __init__(
        self, format: NumberFormat, shape: tuple[int, int], bias: Tensor | None = None, cache: bool = True
    ) -> None:
        super().__init__()
        self.format, self.shape, self.cache = format, (int(shape[0]), int(shape[1])), cache
        self.out_features, self.in_features = self.shape
        for name in ("codes", "scales", "global_scale"):
            self.register_buffer(name, None, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._prepared: dict[torch.dtype, PreparedWeight] = {}

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: NumberFormat, cache: bool = True) -> "QuantizedLinear":
        """Return a layer of the same shape and bias whose weight is still to come by `load`."""
        return cls(format, (linear.out_features, linear.in_features), linear.bias, cache)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weight from its checkpoint tensors, keyed by suffix (`weight`, `weight_scale`, …)."""
        device = None if self.codes is None else self.codes.device
        if device is None and self.bias is not None:
            device = self.bias.device
        self.set_weight(self.format.load({k: v.to(device) if device else v for k, v in tensors.items()}, self.shape))

    def set_weight(self, q: QuantizedWeight) -> None:
        """Take a weight that is already quantized; its tensors are shared, not copied."""
        self.codes, self.scales, self.global_scale = q.codes, q.scales, q.global_scale
        self._prepared.clear()

    @property
    def weight(self) -> QuantizedWeight:
        """The weight as it is held."""
        if self.codes is None:
            raise RuntimeError("This layer has no weight yet: publish to the engine before it generates.")
        return QuantizedWeight(self.codes, self.scales, self.global_scale, self.format, self.shape)

    def prepared(self, dtype: torch.dtype) -> PreparedWeight:
        """Return the operand for inputs of `dtype`, made once per weight."""
        operand = self._prepared.get(dtype)
        if operand is None:
            operand = self.format.prepare(self.weight, dtype)
            if self.cache:
                self._prepared[dtype] = operand
        return operand

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ W.T + bias` in the format's arithmetic."""
        return self.format.apply(x, self.prepared(x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        # A module's `.to(dtype)` casts every floating buffer: codes and scales may move, but their dtype is the format.
        held = {name: getattr(self, name) for name in ("codes", "scales", "global_scale")}
        super()._apply(fn, recurse)
        for name, before in held.items():
            after = getattr(self, name)
            if before is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        self._prepared.clear()
        return self

    def extra_repr(self) -> str:
        """Return the format and the shape, for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.name}"
