"""Where a checkpoint tensor lives among vLLM's modules, by the mappings that the model itself loads with.

And what a live module computes in.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.formats import support
from lit_qrl.network.names import checkpoint_name
from lit_qrl.receipts.checksum import slice_of

# vLLM writes the shape of an INT4 weight once per projection into one parameter that nothing reads.
DESCRIPTIVE = frozenset({"weight_shape", "w13_weight_shape", "w2_weight_shape"})
# A wider parameter holds these exactly, so that casting back loses nothing.
WIDENED = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}
# An expert's matrices: "experts.3.gate_proj", or "experts.3.w1" where the checkpoint counts them.
_EXPERT = re.compile(r"(?P<holder>.+)\.(?P<expert>\d+)\.(?P<leaf>\w+)")
Sent = Mapping[str, tuple["Place", tuple[int, ...], torch.dtype]]
"""Place, shape and dtype of every tensor that was sent."""
_STACKED = {
    "w13": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2": (("down_proj",), ("w2",)),
}
"""vLLM's stacks of experts, and which matrices of a checkpoint lie in each, one after the other."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint tensor lives: an attribute of a module, and which of its `parts` for a fused one.

    Args:
        module_name: in vLLM's model.
        module: that holds it.
        attribute: its name there.
        part: which of `parts` it is.
        parts: names of the checkpoint's layers that the module holds as one; empty where it holds one as it is.
        shards: the module's logical widths that it fills, where those are not `part` alone.
        rewritten: vLLM's loader writes other numbers than it gets, so that nothing can be compared.
        turned: the checkpoint holds the matrix as "in out", which vLLM's loader turns.
        groups: in how many groups the checkpoint has queries, a key's and a value's rows together, which vLLM's loader
            sorts into all queries, all keys and all values; 0 where rows keep their order.
    """

    module_name: str
    module: nn.Module
    attribute: str
    part: int = 0
    parts: tuple[str, ...] = ()
    shards: tuple[int, ...] = ()
    rewritten: bool = False
    turned: bool = False
    groups: int = 0

    def span(self, rows: int) -> tuple[int, int]:
        """Return the layer's first row in its fused module, and the one after its last.

        Args:
            rows: that the module has of the tensor: fewer of scales by the block, or of one process's part.
        """
        sizes = [int(size) for size in self.module.output_sizes]  # pyright: ignore
        first, *_ = shards = self.shards or (self.part,)
        start, count = (sum(found) * rows / sum(sizes) for found in (sizes[:first], [sizes[one] for one in shards]))
        return round(start), round(start) + max(round(count), 1)

    def spread(self, tensor: Tensor, shape: Sequence[int]) -> None:
        """Write the one number that came for a whole layer to each of the logical widths that vLLM holds it as.

        A checkpoint that fuses q, k and v itself has one scale for them. vLLM's loader writes it for the first width,
        and repacking takes the largest of all, of which the others are whatever the memory held.
        """
        widths = len(getattr(self.module, "output_sizes", ()))
        shards = list(self.shards) or ([] if self.parts else list(range(widths)))
        if tensor.numel() == widths and len(shards) > 1 and math.prod(shape) == 1:
            numbers = tensor.data.view(-1)
            numbers[shards] = numbers[shards[0]].clone()

    def in_order(self, tensor: Tensor) -> Tensor:
        """Return rows of the module in the checkpoint's order."""
        if not self._sorts(tensor):
            return tensor
        sizes = [int(size) for size in self.module.output_sizes]  # pyright: ignore
        parts = (part.reshape(self.groups, -1, *part.shape[1:]) for part in tensor.split(sizes))
        return torch.cat(list(parts), 1).reshape(tensor.shape)

    def write(self, tensor: Tensor, sent: Tensor) -> None:
        """Write what was sent into this tensor's slice of the module's; nothing where it does not fit."""
        cut = self.cut(tensor, sent.shape)
        if cut is not None and self._sorts(tensor):
            sizes = [int(size) // self.groups for size in self.module.output_sizes]  # pyright: ignore
            grouped = sent.reshape(self.groups, -1, *sent.shape[1:]).split(sizes, 1)
            tensor.copy_(torch.cat([part.reshape(-1, *sent.shape[1:]) for part in grouped]))
        elif cut is not None:
            cut.copy_(sent)

    def _sorts(self, tensor: Tensor) -> bool:
        rows = sum(int(size) for size in self.module.output_sizes) if self.groups else None  # pyright: ignore
        return rows is not None and tensor.ndim > 0 and tensor.shape[0] == rows

    def cut(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return this tensor's slice of the module's in the shape that was sent; None if it does not fit.

        It is a view of the module's memory, unless vLLM's loader sorts the rows.
        """
        tensor = self.in_order(tensor)
        if self.turned and len(shape) == 2:
            straight = replace(self, turned=False).cut(tensor, shape[::-1])
            return None if straight is None else straight.t()
        if self.parts:
            sizes = [int(size) for size in self.module.output_sizes]  # pyright: ignore
            if tensor.numel() == 1:  # one number for all parts
                tensor = tensor.reshape(-1)[0]
            elif tensor.numel() == len(sizes):
                tensor = tensor.reshape(-1)[(self.shards or (self.part,))[0]]
            else:
                first, last = self.span(tensor.shape[0])
                tensor = tensor[first:last]
        elif tensor.ndim and len(shape) == tensor.ndim and shape[0] < tensor.shape[0]:
            tensor = tensor[: shape[0]]  # vLLM pads the vocabulary, or holds one number for each logical width
        return tensor.reshape(tuple(shape)) if tensor.numel() == math.prod(shape) else None

    def cut_all(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return that slice as a stack of one; None if it does not fit."""
        cut = self.cut(tensor, shape)
        return None if cut is None else cut.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class ExpertPlace(Place):
    """Where a tensor of one expert lives: in a stack "experts · ·", under those of the same expert that lie beside it.

    Its `parts` are the matrices of all experts in the stack.

    Args:
        expert: its number.
        beside: matrices of one expert in the stack.
    """

    expert: int = 0
    beside: int = 1

    def spread(self, tensor: Tensor, shape: Sequence[int]) -> None:
        """Do nothing: each matrix of an expert has numbers of its own."""

    def cut(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return this tensor's slice of the module's, viewed in the shape that was sent; None if it does not fit."""
        every = self.cut_all(tensor, shape)
        return None if every is None or self.expert >= len(every) else every[self.expert]

    def cut_all(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return that slice of every expert, "experts …"; None if it does not fit."""
        if not tensor.ndim:
            return None
        every = tensor.mT if self.turned and tensor.ndim == 3 else tensor
        if self.beside > 1 and every.ndim > 1:
            rows = every.shape[1] // self.beside
            every = every[:, self.part % self.beside * rows :][:, :rows]
        for axis in range(min(every.ndim - 1, len(shape))):  # some kernels want more rows and columns than there are
            every = every.narrow(axis + 1, 0, min(every.shape[axis + 1], shape[axis]))
        return every.view(len(every), *shape) if every.numel() == len(every) * math.prod(shape) else None


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first; whole stacks at once where their slices go side by side.

    Args:
        pairs: of equal shapes.
    """
    stacks: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
    for target, source in pairs:
        to, of = slice_of(target), slice_of(source)
        if to is None or of is None:
            target.copy_(source)
        else:
            stacks.setdefault((id(to.stack), id(of.stack), to.index - of.index), []).append((target, source))
    for (*_, offset), members in stacks.items():
        to, of = slice_of(members[0][0]), slice_of(members[0][1])
        assert to is not None
        assert of is not None
        if len({source.data_ptr() for _, source in members}) == len(of.stack):
            to.stack[offset : offset + len(of.stack)].copy_(of.stack)
        else:
            for target, source in members:
                target.copy_(source)


@lru_cache
def _matrices(count: int, leaves: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{expert}.{leaf}" for expert in range(count) for leaf in leaves)


def expert_place(modules: Mapping[str, nn.Module], layer: str, attribute: str) -> ExpertPlace | None:
    """Return where a tensor of one expert's matrix goes, or None for what is none.

    Args:
        modules: of vLLM's model, by name.
        layer: the matrix, as vLLM's mapping names it.
        attribute: the tensor's name in the checkpoint, such as `weight`.
    """
    found = _EXPERT.fullmatch(layer)
    if found is None:
        return None
    expert, leaf = int(found["expert"]), found["leaf"]
    for name in (f"{found['holder']}.routed_experts", found["holder"]):
        for stack, spellings in _STACKED.items():
            leaves = next((leaves for leaves in spellings if leaf in leaves), ())
            module, key = modules.get(name), f"{stack}_{attribute}"
            if module is None or not leaves or key not in checkpoint_names(module):
                continue
            gated = getattr(getattr(module, "moe_config", None), "is_act_and_mul", True)
            leaves = leaves if gated or len(leaves) == 1 else (leaf,)
            parts = _matrices(int(module.global_num_experts), leaves)  # pyright: ignore[reportArgumentType]
            if (own := f"{expert}.{leaf}") in parts:
                return ExpertPlace(
                    name, module, key, parts.index(own), parts, expert=expert, beside=len(leaves),
                    turned=bool(getattr(getattr(module, key, None), "is_transposed", False)),
                )  # fmt: skip
    return None


def lacking(places: Iterable[Place]) -> list[str]:
    """Return the parts of a layer that nothing came for, in those of its tensors of which something came.

    Args:
        places: of what came for the layer.

    >>> lacking([Place("qkv", nn.Module(), "weight", part, ("q", "k", "v")) for part in (0, 2)])
    ['k']
    """
    came: dict[str, set[int]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for place in places:
        parts[place.attribute] = place.parts
        came.setdefault(place.attribute, set()).add(place.part)
    left = [name for key, got in came.items() for i, name in enumerate(parts[key]) if i not in got]
    return sorted(set(left))


def undescribed(tensors: Iterable[tuple[str, Tensor]], layers: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield a stream without what is `DESCRIPTIVE` of some layers.

    Args:
        tensors: checkpoint names and tensors.
        layers: names without the attribute.

    >>> [name for name, _ in undescribed([("a.weight_shape", torch.ones(2)), ("b.weight_shape", torch.ones(2))], {"a"})]
    ['b.weight_shape']
    """
    for name, tensor in tensors:
        if name[-6:] == "_shape":
            layer, _, attribute = name.rpartition(".")
            if attribute in DESCRIPTIVE and layer in layers:
                continue
        yield name, tensor


def whole_experts(places: Sequence[Place]) -> bool:
    """Return whether every matrix of every expert came, each with all that came of any.

    A module of experts has parameters that no checkpoint of ours fills, such as an order of its columns.

    Args:
        places: of what came for a module.
    """
    stacks = {name: {one.attribute.removeprefix(f"{name}_") for one in places if one.attribute.startswith(f"{name}_")}
              for name in _STACKED}  # fmt: skip
    all_experts = bool(places) and all(isinstance(one, ExpertPlace) for one in places)
    return all_experts and stacks["w13"] == stacks["w2"] and not lacking(places)


def restored_names(module: nn.Module) -> set[str]:
    """Return the names of the tensors that vLLM makes anew, in the checkpoint's layout, when it reloads this module."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, buffers = get_layerwise_info(module).restore_metadata
    return {*parameters, *buffers}


def checkpoint_names(module: nn.Module) -> set[str]:
    """Return the names of the tensors that vLLM's loader fills in this module; repacking may rename them."""
    return {*restored_names(module), *module._parameters, *module._buffers}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and buffers."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in the dtype that was sent, where the engine holds it in a wider one."""
    return tensor.to(dtype) if (dtype, tensor.dtype) in WIDENED else tensor


def loaded_format(module: nn.Module, dtype: torch.dtype) -> str:
    """Return the name of the number format that a live vLLM module computes in, read from its method.

    A method that computes in none of ours is returned by its own name.
    """
    plain = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    method = getattr(module, "quant_method", None)
    scheme = getattr(module, "scheme", None)
    kind = type(scheme if scheme is not None else method).__name__
    if method is None or kind.startswith("Unquantized"):
        return plain.get(dtype, str(dtype).removeprefix("torch."))
    by_block = "block" if getattr(method, "block_quant", False) else "tensor"
    weights: Any = getattr(method, "weight_quant", scheme)  # of experts the method has it, of linear layers the scheme
    strategy = getattr(weights, "strategy", None) if weights is not None else by_block
    details = getattr(strategy, "value", strategy), getattr(weights, "num_bits", 4)
    short = kind.removeprefix("CompressedTensors").removesuffix("MoEMethod")
    spelled = {short, *(f"{short}[{detail}]" for detail in details)}
    return next(iter(support.names_where(lambda row: not spelled.isdisjoint(row.vllm_methods))), kind)


_LETTERS = {"q": 0, "k": 1, "v": 2}
"""vLLM's names of the parts of an attention layer's fused projection."""
SORTING = frozenset({"FalconModel", "GPTNeoXModel", "BloomModel"})
"""Models of vLLM whose checkpoints hold queries, key and value of a group of heads together, and whose loaders sort
them into all queries, all keys and all values. (vLLM 0.32 has the second and the third from transformers, as they are.)
"""


class Naming:
    """What one model of vLLM calls the tensors of a checkpoint, and which of them it holds as one.

    Args:
        model: vLLM's; wrappers inside, such as a multimodal model's text part, have mappings of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._renamings: list[tuple[str, Any]] = []
        self._parts: dict[str, dict[str, tuple[int, ...]]] = {}
        self._known: dict[str, str] = {}
        self.learned: dict[str, str] = {}
        for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
            if len(parts) > 1:
                self._parts[fused] = {part: (index,) for index, part in enumerate(parts)}
        added: list[Any] = []
        for name, module in model.named_modules():
            mapper = getattr(module, "hf_to_vllm_mapper", None)
            if mapper is not None and not any(mapper is one for one in added):  # a wrapper shows its inner model's, too
                added.append(mapper)
                self._add(checkpoint_name(name), mapper)
        sorting = (part for part in model.modules() if type(part).__name__ in SORTING)
        self._sorted = {module for part in sorting for module in part.modules() if hasattr(module, "output_sizes")}
        self._rearranges = any(hasattr(module, "permute_qk_weight_for_rotary") for module in model.modules())

    def _add(self, prefix: str, mapper: Any) -> None:
        # of 0.32, of 0.26
        rename = getattr(mapper, "get_rename_mapper", None) or getattr(mapper, "get_unstacked_mapper", None)
        self._renamings.append((f"{prefix}." if prefix else "", rename() if rename is not None else mapper))
        for old, (new, shard) in getattr(mapper, "orig_to_new_stacked", {}).items():
            given: list[Any] = list(shard) if isinstance(shard, (list, tuple)) else [shard]
            shards: tuple[Any, ...] = tuple(_LETTERS.get(one, one) for one in given if one is not None)
            if shards and all(isinstance(one, int) for one in shards):
                part, fused = (one.strip(".").rpartition(".")[2] for one in (old, new))
                self._parts.setdefault(fused, {})[part] = shards

    def renamed(self, name: str) -> str:
        """Return what vLLM calls a tensor of the checkpoint, its layer not yet fused with others."""
        if name not in self._known:
            result = name
            for prefix, mapper in self._renamings:
                if result.startswith(prefix):
                    result = prefix + (mapper._map_name(result[len(prefix) :]) or result[len(prefix) :])
            self._known[name] = result
        return self._known[name]

    def learn(self, name: str, other: str) -> None:
        """Take a tensor for what a checkpoint calls `other`."""
        self.learned[name], self._known[name] = other, self.renamed(other)

    def fused(self, layer: str) -> Iterator[tuple[str, int, tuple[str, ...], tuple[int, ...]]]:
        """Yield the layers that `layer` may be a part of: name, which part, the names of all, its logical widths.

        Args:
            layer: as `renamed` gives it.
        """
        parent, _, leaf = layer.rpartition(".")
        for fused, parts in self._parts.items():
            if leaf in parts:
                names = tuple(sorted(parts, key=lambda part: parts[part]))
                yield f"{parent}.{fused}" if parent else fused, names.index(leaf), names, parts[leaf]

    def groups(self, module: Any) -> int:
        """Return how many groups of rows vLLM's loader sorts in this module; 0 where it leaves them as they are."""
        count = getattr(module, "total_num_kv_heads", 0) if module in self._sorted else 0
        return count if count > 1 else 0

    def rewrites(self, layer: str, parameter: Any) -> bool:
        """Return True where vLLM's loader writes other numbers than it gets.

        State-space layers keep −exp(A) under a composed loader, and Llama 4's rows of q and k come in another order.
        """
        return computing_loader(parameter) is not None or (
            self._rearranges and layer.rpartition(".")[2] in ("q_proj", "k_proj")
        )


def computing_loader(parameter: Any) -> Callable[[Tensor, Tensor], None] | None:
    """Return the loader of a parameter that computes what it keeps of what it gets; None where it keeps that itself."""
    loader = getattr(parameter, "weight_loader", None)
    inner = None if loader is None else inspect.unwrap(loader)
    return inner if "composed" in getattr(inner, "__qualname__", "") else None
