"""Weights in a live vLLM model: where each checkpoint tensor goes, loading a whole stream, and proof of what arrived.

A tensor passes three places: vLLM's loader writes it into a parameter in the checkpoint's layout, often a slice of a
fused one; the layer's method repacks that for its kernel; the result is copied into the memory that the kernels (and
captured CUDA graphs) read. The ledger's receipts are taken from the first place, the checksums of the second and the
third must agree, and `read_columns` asks the kernel itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import listed
from lit_qrl.network.linears import transposed_layers
from lit_qrl.network.names import checkpoint_name, stored
from lit_qrl.receipts.checksum import Checksums
from lit_qrl.receipts.ledger import Fault, PublishError, ReceivedLedger, RefusedError, share_of_bound
from lit_qrl.rollout.vllm import derived
from lit_qrl.rollout.vllm import fast_load as direct
from lit_qrl.rollout.vllm.held import Held
from lit_qrl.rollout.vllm.locations import (
    DESCRIPTIVE,
    Place,
    checkpoint_names,
    expert_place,
    lacking,
    loaded_format,
    model_runner,
    narrowed,
    restored_names,
    tensors_of,
    whole_experts,
)
from lit_qrl.rollout.vllm.naming import Naming
from lit_qrl.rollout.vllm.parallel import share, unit_vectors
from lit_qrl.rollout.vllm.reload import complete, reloading, same_kernel
from lit_qrl.rollout.vllm.upkeep import pack_again


class LiveModel:
    """The model inside a running engine, seen through checkpoint names.

    Args:
        llm: the in-process `vllm.LLM`.
        network: the learner's Hugging Face model, which knows the names of stacked tensors on the hub.
        divided: this process holds a part of the engine.
    """

    def __init__(self, llm: Any, network: Any = None, divided: bool = False) -> None:
        self.llm, self.network, self.divided = llm, network, divided
        self.runner = model_runner(llm)
        self.model: nn.Module = self.runner.get_model()
        self._modules = {
            checkpoint_name(name): module
            for name, module in self.model.named_modules()
            if not isinstance(getattr(module, "base_layer", None), nn.Module)
        }
        self._naming = Naming(self.model)
        self._turned = frozenset(transposed_layers(network) if network is not None else ())
        self._derived = {name: module for name, module in self._modules.items() if derived.names(module)}
        self.sent: dict[str, tuple[Place, tuple[int, ...], torch.dtype]] = {}
        self.pending: dict[str, list[str]] = {}
        self._layout: dict[tuple[str, str], str] = {}
        self._ledger: ReceivedLedger | None = None
        self.routes: direct.Routes | None = None
        self.learns_routes = True
        self._repacked = Checksums()
        self._held: Held | None = None
        self._opaque: list[str] = []
        self._computed: dict[str, tuple[Place, Tensor]] = {}
        self._untouched: set[str] = set()
        self._names = {id(module): name for name, module in self._modules.items()}
        self._watch_repacking()

    def locate(self, name: str) -> Place | None:
        """Return where the checkpoint tensor `name` goes, or None where only vLLM's loader knows (stacked experts)."""
        layer, _, attribute = name.rpartition(".")
        place = self.locate_layer(layer, attribute)
        if place is None or place.attribute not in checkpoint_names(place.module):
            return None
        return replace(place, turned=True) if layer in self._turned else place

    def locate_layer(self, layer: str, attribute: str = "weight") -> Place | None:
        """Return the module that holds a layer of the checkpoint, and which part of it."""
        for name in dict.fromkeys((self._naming.renamed(f"{layer}.{attribute}"), f"{layer}.{attribute}")):
            found, _, key = name.rpartition(".")
            if found in self._modules:
                module = self._modules[found]
                rewritten = self._naming.rewrites(layer, getattr(module, key, None))
                return Place(found, module, key, rewritten=rewritten, groups=self._naming.groups(module))
            for fused, part, parts, shards in self._naming.fused(found):
                if hasattr(self._modules.get(fused), "output_sizes"):
                    module, rewritten = self._modules[fused], self._naming.rewrites(layer, None)
                    return Place(fused, module, key, part, parts, shards, rewritten)
            if (expert := expert_place(self._modules, found, key)) is not None:
                return expert
        return None

    def held(self, layers: Iterable[str]) -> dict[str, list[str]]:
        """Return for each module the layers of the checkpoint, among `layers`, that it holds."""
        found: dict[str, list[str]] = {}
        for layer in layers:
            if (place := self.locate_layer(layer)) is not None:
                found.setdefault(place.module_name, []).append(layer)
        return found

    def share(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor that this process holds: all of it where the engine has no other."""
        layer, _, attribute = name.rpartition(".")
        place = self.locate_layer(layer, attribute) if self.divided and attribute not in DESCRIPTIVE else None
        return tensor if place is None else share(replace(place, turned=layer in self._turned), tensor)

    def load(self, tensors: Iterator[tuple[str, Tensor]], ledger: ReceivedLedger) -> None:
        """Replace every weight by the stream's and write into `ledger` what the modules hold.

        The first stream goes through vLLM's own reload, which shows the routes of the later ones.

        Raises:
            PublishError: for a fused or quantized layer of which a part is missing; that layer keeps its old weights.
        """
        self._ledger, self.sent, self.pending, routes = ledger, {}, {}, self.routes
        self._repacked, self._opaque, self._untouched = Checksums(), [], set()
        self._held = Held(self.sent, ledger)
        try:
            if routes is not None:
                whole, parts = tensors, ((name, self.share(name, tensor)) for name, tensor in tensors)
                incomplete = direct.DirectLoad(self, routes, ledger).load(parts if self.divided else whole)
                derived.make_again(self.llm, self._derived)
            else:
                with reloading(self.llm, self.model):
                    self.model.load_weights(self._gate(tensors))  # pyright: ignore[reportCallIssue]
                    incomplete = self._revert_incomplete()
                self._record_unprocessed()
            self._refresh_tied()
            ledger.faults += derived.stale(self._derived, self._columns) + derived.other(self._computed)
            self._check_copies()
        finally:
            self._ledger = self._held = None
        if incomplete:
            raise PublishError(incomplete, ledger.version)
        if routes is None or len(self.sent) < len(routes.places):
            ledger.faults += self._not_loaded()
        if routes is None and self.learns_routes and not ledger.faults and not self._opaque:
            self.routes = direct.learn(self.sent, ledger.receipts())

    def _gate(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Note what passes to vLLM's loader; what no module is known to keep is recorded here."""
        assert self._ledger is not None
        current = ""
        for name, tensor in tensors:
            place, handed = self.locate(name), {self._naming.learned.get(name, name): tensor}
            if place is None and self.network is not None:
                handed = stored(self.network, name, tensor)
                if len(handed) == 1:
                    self._naming.learn(name, *handed)
                    place = self.locate(name)
            if place is not None and place.module_name != current:
                self._complete(current)
                current = place.module_name
            if place is None or place.rewritten:
                # Of "experts.0.up_proj.weight", which the hub has in place of a stack, the module that holds them all.
                self._opaque += [name, *(f"{key.rsplit('.', 3)[0]}." for key in list(handed)[:1] if len(handed) > 1)]
                self._ledger.record(name, self.share(name, tensor))
                if place is None or not derived.note(self._computed, name, place, tensor):
                    self._ledger.unread.append(name)
            elif name in self.sent or place.attribute in DESCRIPTIVE:
                self._ledger.record(name, self.share(name, tensor))
            if name not in self.sent and place is not None:
                self.sent[name] = place, tuple(self.share(name, tensor).shape), tensor.dtype
                if place.attribute not in DESCRIPTIVE and not place.rewritten:
                    self.pending.setdefault(place.module_name, []).append(name)
            yield from handed.items()
        self._complete(current)

    def _complete(self, module_name: str) -> None:
        """Have a module of experts processed of which all came, though vLLM waits for more."""
        names = self.pending.get(module_name, [])
        if whole_experts([self.sent[name][0] for name in names]):
            complete(self._modules[module_name], len(names))

    def _watch_repacking(self) -> None:
        """Take the receipts of a layer when its parameters are complete and not yet repacked."""
        methods: dict[int, Any] = {}
        for module in self._modules.values():
            method = getattr(module, "quant_method", None)
            if method is not None and hasattr(method, "process_weights_after_loading"):
                methods[id(method)] = method
        for method in methods.values():
            method.process_weights_after_loading = self._watched(method.process_weights_after_loading)

    def _watched(self, process: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def watched(layer: nn.Module) -> None:
            name = self._names.get(id(layer))
            if self._ledger is None or name is None:
                process(layer)
                return
            before = {key: tensor.data_ptr() for key, tensor in tensors_of(layer).items()}
            self._record(name)
            with same_kernel(layer):
                process(layer)
            made = restored_names(layer)
            for key, tensor in tensors_of(layer).items():
                if key not in made and before.get(key) == tensor.data_ptr():
                    continue  # the live tensor itself, which a reload leaves where it is (a router's bias)
                self._repacked.add(f"{name}\0{key}", tensor)
                kept = before.get(key) == tensor.data_ptr() != 0
                self._layout[name, key] = "repacked" if not kept else "kept" if tensor.is_contiguous() else "turned"

        return watched

    def _record(self, module_name: str) -> None:
        assert self._held is not None
        self._held.take(self.pending.pop(module_name, []), tensors_of(self._modules[module_name]))

    def note(self, name: str, held: Tensor) -> None:
        """Take the receipt of what a module holds of a tensor."""
        assert self._held is not None
        self._held.note(name, held)

    def _record_unprocessed(self) -> None:
        """Record layers that vLLM does not process after loading, such as norms."""
        for module_name in list(self.pending):
            self._record(module_name)
            module = self._modules[module_name]
            self._layout.update({(module_name, key): "kept" for key in tensors_of(module)})

    def _check_copies(self) -> None:
        """Compare what repacking returned with what the kernels' memory holds."""
        assert self._ledger is not None
        wanted = self._repacked.finish()
        live = Checksums()
        for key in wanted:
            module_name, _, attribute = key.partition("\0")
            tensor = getattr(self._modules[module_name], attribute, None)
            if tensor is not None:
                live.add(key, tensor)
        found = live.finish()
        for key, (value, _) in wanted.items():
            if key not in found or found[key][0] != value:
                self._ledger.faults.append(Fault("not_copied", key.replace("\0", ".")))
        assert self._held is not None
        self._held.check_digits()

    def _revert_incomplete(self) -> list[Fault]:
        """Drop partly loaded layers from the reload: vLLM would fill the rest with uninitialised memory."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        seen: dict[str, list[Place]] = {}
        for place, _, _ in self.sent.values():
            seen.setdefault(place.module_name, []).append(place)
        faults = []
        for module_name, module in self._modules.items():
            places, info = seen.get(module_name, []), get_layerwise_info(module)
            if info.can_load() and not info.load_numel:
                self._untouched.add(module_name)  # a loader that wrote past the reload has lost what it wrote
            left = lacking(places)
            short = info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0)
            if not left and not (short and not hasattr(module, "num_embeddings_padded") and not whole_experts(places)):
                continue
            came = ", ".join(sorted({one.attribute for one in places})) or f"{info.load_numel} numbers"
            what = f"without {listed(left, 8)}" if left else f"only {came} arrived"
            faults.append(Fault("fused_group", module_name, what))
            info.loaded_weights.clear()
            info.load_numel = 0
            self.pending.pop(module_name, None)
        return faults

    def _tied(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that got no tensor because they share a loaded module's parameters."""
        loaded = {place.module_name for place, _, _ in self.sent.values()}
        reached = {tensor.data_ptr() for name in loaded for tensor in tensors_of(self._modules[name]).values()} - {0}
        return [
            (name, module)
            for name, module in self._modules.items()
            if name not in loaded
            and (own := [tensor for tensor in module._parameters.values() if tensor is not None])
            and all(tensor.data_ptr() in reached for tensor in own)
        ]

    @torch.no_grad()
    def _refresh_tied(self) -> None:
        """Pack a tied output head again, and ask it for a few columns of the embedding that it should hold.

        On CPU vLLM packs a copy for the head's GEMM, and a reload of the embedding alone leaves that one as it was.
        """
        assert self._ledger is not None
        for name, module in self._tied():
            pack_again(self.llm, module)
            weight = getattr(module, "weight", None)
            if weight is None or weight.ndim != 2 or not hasattr(module, "embedding_dim"):
                continue
            columns = [0, weight.shape[1] // 2, weight.shape[1] - 1]
            got = self.read_columns(name, columns)
            if got is not None and bool(
                (share_of_bound(got, weight[: len(got), columns].float(), exact=True) > 1).any()
            ):
                self._ledger.faults.append(Fault("gemm", f"{name}.weight", "tied to the embedding"))

    def _not_loaded(self) -> list[Fault]:
        """Return a fault for each module with parameters of its own that no tensor was for."""
        loaded = {place.module_name for place, _, _ in self.sent.values()} | {name for name, _ in self._tied()}
        unlocated = {name.rpartition(".")[0] for name in self._opaque}
        return [
            Fault("missing", name, "no tensor of the stream was for it")
            for name, module in self._modules.items()
            if name not in loaded
            # Single numbers are scales of the KV cache, which have a default.
            and any(
                tensor is not None and tensor.numel() != 1
                for key, tensor in module._parameters.items()
                if key not in derived.names(module)
            )
            and (name in self._untouched or not any(name.startswith(n) or n.startswith(name) for n in unlocated))
        ]

    def replace(self, tensors: Iterator[tuple[str, Tensor]], ledger: ReceivedLedger) -> None:
        """Overwrite plain parameters in place (norms); their memory stays, as captured CUDA graphs need.

        Raises:
            RefusedError: for a name that is not a plain parameter of that shape.
        """
        for name, tensor in tensors:
            place = self.locate(name)
            live = None if place is None else getattr(place.module, place.attribute, None)
            if place is None or live is None or hasattr(place.module, "quant_method") or live.shape != tensor.shape:
                raise RefusedError(
                    f"{name} cannot be replaced in place. Expected: a norm of the engine's model, in its shape. "
                    f"Given: {tuple(tensor.shape)}. Send all other weights through load_weights."
                )
            live.data.copy_(tensor)
            ledger.record(name, live)

    def read_back(self, name: str) -> Tensor | None:
        """Return the live tensor under its checkpoint name, or None where the layer was repacked."""
        if name not in self.sent:
            return None
        place, shape, dtype = self.sent[name]
        if place.rewritten:
            return None
        if place.attribute in DESCRIPTIVE:  # later publishes leave it, and a sleep may have dropped it
            return None
        layout = self._layout.get((place.module_name, place.attribute))
        live = getattr(place.module, place.attribute, None)
        if live is None or live.numel() == 0 or layout not in ("kept", "turned"):
            return None
        cut = place.cut(live.t() if layout == "turned" else live, shape)
        return None if cut is None else narrowed(cut, dtype)

    def read_columns(self, layer: str, columns: Sequence[int]) -> Tensor | None:
        """Return columns "out columns" of a linear layer by multiplying it with unit vectors, or None if unknown.

        A product with a unit vector has one term that is not zero; `rounding.column_bound` says what it may round.
        """
        place = self.locate_layer(layer)
        rows = None if place is None or place.rewritten else self._columns(place.module, columns)
        if place is None or rows is None:
            return None
        if place.parts:
            first, last = place.span(len(rows))
            return rows[first:last]
        # vLLM pads the vocabulary
        own: Any = getattr(place.module, "shard_indices", None)
        return place.in_order(rows) if own is None else rows[: own.num_org_elements]

    @torch.no_grad()
    def _columns(self, module: nn.Module, columns: Sequence[int]) -> Tensor | None:
        from vllm.config import set_current_vllm_config

        method: Any = getattr(module, "quant_method", None)
        config = self.llm.llm_engine.vllm_config
        device = next((t.device for t in tensors_of(module).values()), torch.device("cpu"))
        units = unit_vectors(module, columns, config.model_config.dtype, device)
        if method is None or units is None:
            return None
        with set_current_vllm_config(config):
            return method.apply(module, units, None).t()

    def formats(self) -> dict[str, str]:
        """Return for every tensor of the last stream the name of the format that its live module computes in."""
        modules = {(place.module_name, dtype): place.module for place, _, dtype in self.sent.values()}
        found = {(name, dtype): loaded_format(module, dtype) for (name, dtype), module in modules.items()}
        return {name: found[place.module_name, dtype] for name, (place, _, dtype) in self.sent.items()}

    @torch.inference_mode()
    def clear_kv_cache(self) -> None:
        """Zero every page: after a forward pass with NaN, a page keeps it until it is overwritten."""
        for cache in self.runner.kv_caches:
            for part in cache if isinstance(cache, (list, tuple)) else (cache,):
                part.zero_()
