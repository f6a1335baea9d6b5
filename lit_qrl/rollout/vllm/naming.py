"""From names of a checkpoint to names of vLLM's modules, by the mappings that the model itself loads with."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lit_qrl.network.names import checkpoint_name
from lit_qrl.rollout.vllm.derived import computing_loader

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
