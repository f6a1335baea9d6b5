"""Weights in a live vLLM model: finding the place of each (`locations`), loading a stream, and proof of what arrived.

A tensor passes three places: vLLM's loader writes it into a parameter in the checkpoint's layout, often a slice of a
fused one; the layer's method repacks that for its kernel; the result is copied into the memory that the kernels (and
captured CUDA graphs) read. The ledger's receipts are taken from the first place, the checksums of the second and the
third must agree, and `read_columns` asks the kernel itself.

Once a first stream went through vLLM's reload, which shows where every tensor ends up, later ones go there directly: a
tensor that lies in the kernels' memory as it was sent is copied there, which the receipts of the first stream prove bit
by bit; a layer that its method repacks goes through the same repacking, without the loaders that count what arrived.

Some tensors vLLM makes of weights: latent attention multiplies by pieces of `kv_b_proj` of its own, after every reload;
they are made again and compared with the layer that they are made of. Of a state's decay the checkpoint has the
logarithm: a loader computes −exp(A) as it comes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lit_qrl.errors import listed
from lit_qrl.formats import support
from lit_qrl.network.linears import transposed_layers
from lit_qrl.network.names import checkpoint_name, stored
from lit_qrl.network.structure import computed_buffers
from lit_qrl.receipts.checksum import Checksums, slices
from lit_qrl.receipts.ledger import (
    Constants,
    Fault,
    PublishError,
    ReceivedLedger,
    RefusedError,
    TensorReceipt,
    share_of_bound,
)
from lit_qrl.rollout.vllm.locations import (
    DESCRIPTIVE,
    ExpertPlace,
    Naming,
    Place,
    Sent,
    checkpoint_names,
    computing_loader,
    copy_all,
    expert_place,
    lacking,
    loaded_format,
    narrowed,
    restored_names,
    tensors_of,
    whole_experts,
)
from lit_qrl.rollout.vllm.parallel import own_part
from lit_qrl.rollout.vllm.upkeep import forget_kernels, pack_again, without_adapters


class LiveModel:
    """The model inside a worker of vLLM, seen through checkpoint names.

    Args:
        model: vLLM's.
        config: of vLLM.
        network: the learner's Hugging Face model, which knows the names of stacked tensors on the hub.
        divided: this process holds a part of the engine.
    """

    def __init__(self, model: nn.Module, config: Any, network: Any = None, divided: bool = False) -> None:
        self.model, self.config, self.network, self.divided = model, config, network, divided
        self._modules = {
            checkpoint_name(name): module
            for name, module in self.model.named_modules()
            if not isinstance(getattr(module, "base_layer", None), nn.Module)
        }
        self._naming = Naming(self.model)
        self._turned = frozenset(transposed_layers(network) if network is not None else ())
        self._derived = {name: module for name, module in self._modules.items() if derived_names(module)}
        self.sent: dict[str, tuple[Place, tuple[int, ...], torch.dtype]] = {}
        self.pending: dict[str, list[str]] = {}
        self._layout: dict[tuple[str, str], str] = {}
        self.routes: Routes | None = None
        self.learns_routes = True
        self._repacked = Checksums()
        self._collector: ReceiptCollector | None = None
        self._reload: ExitStack | None = None
        self._direct: DirectLoad | None = None
        self._opaque: list[str] = []
        self._computed: dict[str, tuple[Place, Tensor]] = {}
        self._untouched: set[str] = set()
        self._names = {id(module): name for name, module in self._modules.items()}
        self._watch_repacking()
        self.constants = Constants(partial(computed_buffers, model, beside_weights=False))
        """Buffers that vLLM made when it was built: they are looked at after each publish, and after a sleep."""

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

    def holders(self, layers: Iterable[str]) -> dict[str, list[str]]:
        """Return for each module the layers of the checkpoint, among `layers`, that it holds."""
        found: dict[str, list[str]] = {}
        for layer in layers:
            if (place := self.locate_layer(layer)) is not None:
                found.setdefault(place.module_name, []).append(layer)
        return found

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor that this process holds: all of it where the engine has no other."""
        layer, _, attribute = name.rpartition(".")
        place = self.locate_layer(layer, attribute) if self.divided and attribute not in DESCRIPTIVE else None
        return tensor if place is None else own_part(replace(place, turned=layer in self._turned), tensor)

    def begin(self, ledger: ReceivedLedger) -> None:
        """Begin to replace every weight; `ledger` gets what the modules hold.

        The first stream goes through vLLM's own reload, which shows the routes of the later ones.
        """
        self.abandon()
        self.sent, self.pending = {}, {}
        self._repacked, self._opaque, self._untouched = Checksums(), [], set()
        self._collector = ReceiptCollector(self.sent, ledger)
        if self.routes is not None:
            self._direct = DirectLoad(self, self.routes, self._collector)
            return
        with self._inside():
            self._reload = reloading(self.model, self.config)

    def take(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take a part of the stream: fused groups and experts of a layer may go over into the next."""
        with self._inside():
            if self._direct is not None:
                parts = ((name, self.own_part(name, tensor)) for name, tensor in tensors)
                self._direct.take(parts if self.divided else tensors)
            else:
                self.model.load_weights(self._gate(tensors))  # pyright: ignore[reportCallIssue]

    def finish(self) -> None:
        """End the stream.

        Raises:
            PublishError: for a fused or quantized layer of which a part is missing; that layer keeps its old weights.
        """
        assert self._collector is not None
        ledger, routes = self._collector.ledger, self.routes
        try:
            with self._inside():
                if self._direct is not None:
                    incomplete = self._direct.finish()
                    derive_again(self.config, self._derived)
                else:
                    incomplete = self._revert_incomplete()
                    self._close_reload()
                    self._record_unprocessed()
                ledger.faults += self._refresh_tied()
                ledger.faults += stale_derived(self._derived, self._columns) + wrongly_computed(self._computed)
                ledger.faults += self.constants.faults() + self._not_copied()
                self._collector.check_digits()
        finally:
            self.abandon()
        if incomplete:
            raise PublishError(incomplete, ledger.version)
        if routes is None or len(self.sent) < len(routes.places):
            ledger.faults += self._not_loaded()
        if routes is None and self.learns_routes and not ledger.faults and not self._opaque:
            self.routes = learn(self.sent, ledger.receipts())

    def abandon(self) -> None:
        """Give up what was begun and not finished: layers that got nothing have their old weights back."""
        self._close_reload()
        self._collector = self._direct = None

    def _close_reload(self) -> None:
        reload, self._reload = self._reload, None
        if reload is not None:
            with self._inside():
                reload.close()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config), torch.no_grad():
            yield

    def _gate(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Note what passes to vLLM's loader; what no module is known to keep is recorded here."""
        assert self._collector is not None
        ledger, current = self._collector.ledger, ""
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
                ledger.record(name, self.own_part(name, tensor))
                if place is not None and computing_loader(getattr(place.module, place.attribute, None)) is not None:
                    self._computed[name] = place, tensor.clone()
                else:
                    ledger.unread.append(name)
            elif name in self.sent or place.attribute in DESCRIPTIVE:
                ledger.record(name, self.own_part(name, tensor))
            if name not in self.sent and place is not None:
                self.sent[name] = place, tuple(self.own_part(name, tensor).shape), tensor.dtype
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
            if self._collector is None or name is None:
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
        assert self._collector is not None
        self._collector.take(self.pending.pop(module_name, []), tensors_of(self._modules[module_name]))

    def _record_unprocessed(self) -> None:
        """Record layers that vLLM does not process after loading, such as norms."""
        for module_name in list(self.pending):
            self._record(module_name)
            module = self._modules[module_name]
            self._layout.update({(module_name, key): "kept" for key in tensors_of(module)})

    def _not_copied(self) -> list[Fault]:
        """Return a fault for each result of repacking that the kernels' memory does not hold."""
        wanted = self._repacked.finish()
        live = Checksums()
        for key in wanted:
            module_name, _, attribute = key.partition("\0")
            tensor = getattr(self._modules[module_name], attribute, None)
            if tensor is not None:
                live.add(key, tensor)
        found = live.finish()
        wrong = [key for key, (value, _) in wanted.items() if key not in found or found[key][0] != value]
        return [Fault("not_copied", key.replace("\0", ".")) for key in wrong]

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
            faults.append(incomplete(module_name, left, came))
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
    def _refresh_tied(self) -> list[Fault]:
        """Pack a tied output head again, and ask it for a few columns of the embedding that it should hold.

        On CPU vLLM packs a copy for the head's GEMM, and a reload of the embedding alone leaves that one as it was.
        """
        faults = []
        for name, module in self._tied():
            pack_again(module)
            weight = getattr(module, "weight", None)
            if weight is None or weight.ndim != 2 or not hasattr(module, "embedding_dim"):
                continue
            columns = [0, weight.shape[1] // 2, weight.shape[1] - 1]
            got = self.read_columns(name, columns)
            if got is not None and bool(
                (share_of_bound(got, weight[: len(got), columns].float(), exact=True) > 1).any()
            ):
                faults.append(Fault("gemm", f"{name}.weight", "tied to the embedding"))
        return faults

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
                if key not in derived_names(module)
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
        ledger.faults += self.constants.faults()

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

        A product with a unit vector has one term that is not zero; `ledger.column_bound` says what it may round.
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
        method: Any = getattr(module, "quant_method", None)
        names = ("input_size_per_partition", "input_size", "embedding_dim")
        size = next((int(found) for name in names if (found := getattr(module, name, None))), None)
        if method is None or size is None:
            return None
        device = next((t.device for t in tensors_of(module).values()), torch.device("cpu"))
        units = one_hot(torch.tensor(list(columns), device=device), size).to(self.config.model_config.dtype)
        with self._inside():
            return method.apply(module, units, None).t()

    def formats(self) -> dict[str, str]:
        """Return for every tensor of the last stream the name of the format that its live module computes in."""
        modules = {(place.module_name, dtype): place.module for place, _, dtype in self.sent.values()}
        found = {(name, dtype): loaded_format(module, dtype) for (name, dtype), module in modules.items()}
        return {name: found[place.module_name, dtype] for name, (place, _, dtype) in self.sent.items()}


@dataclass(frozen=True)
class Routes:
    """What each module takes, and where.

    Args:
        places: of every checkpoint tensor.
        members: names of the tensors that a module takes, by module name.
        views: the kernels' memory of the tensors that lie there as they were sent, in the shape that is sent.
    """

    places: dict[str, Place]
    members: dict[str, frozenset[str]]
    views: dict[str, Tensor]

    def copies(self, module_name: str) -> bool:
        """Return True when the module's tensors are copied, False when they are repacked."""
        return self.members[module_name] <= self.views.keys()


def learn(sent: Sent, receipts: Mapping[str, TensorReceipt]) -> Routes | None:
    """Return the routes that a whole reload took, or None where only vLLM's loader knows one.

    Args:
        sent: place, shape and dtype of every tensor of the reload.
        receipts: of what the modules held before repacking.
    """
    places = {name: place for name, (place, _, _) in sent.items()}
    members: dict[str, set[str]] = {}
    for name, place in places.items():
        members.setdefault(place.module_name, set()).add(name)
    views: dict[str, Tensor] = {}
    ledger = ReceivedLedger(-1)
    collector = ReceiptCollector(sent, ledger)
    for names in members.values():
        module = places[next(iter(names))].module
        found = _views({name: sent[name] for name in names}, module) if _reads_its_tensors(module) else {}
        views |= found
        collector.take(list(found), memory_of(module))
    held = ledger.receipts()
    same = {name: name in receipts and receipts[name].checksum == one.checksum for name, one in held.items()}
    proven = {
        name for names in members.values() if all(same.get(name) for name in names) for name in names
    }  # a module is copied as a whole or not at all
    return Routes(
        places,
        {module_name: frozenset(names) for module_name, names in members.items()},
        {name: view for name, view in views.items() if name in proven},
    )


def _reads_its_tensors(module: nn.Module) -> bool:
    method: Any = getattr(module, "quant_method", None)
    if method is None:
        return True
    scheme = getattr(module, "scheme", None)
    kind = type(method if scheme is None else scheme).__name__.removeprefix("CompressedTensors")
    device = support.device_here()
    return bool(support.names_where(lambda row: kind in row.vllm_copied and device in row.vllm_copied_on))


def memory_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors that lie in one piece, as they lie: turned where the module has them turned."""
    own = {**vars(module), **tensors_of(module)}
    held = {name: one.data for name, one in own.items() if isinstance(one, Tensor) and one.numel()}
    laid = {name: one.t() if one.ndim == 2 and not one.is_contiguous() else one for name, one in held.items()}
    return {name: one for name, one in laid.items() if one.is_contiguous()}


def _views(sent: Sent, module: nn.Module) -> dict[str, Tensor]:
    """Return the module's memory of each tensor sent; nothing unless they make up all that it holds."""
    found: dict[str, Tensor | None] = {}
    memory = memory_of(module)
    for place, members in by_stack(sent, sent):
        held = memory.get(place.attribute)
        every = None if held is None else place.cut_all(held, sent[next(iter(members.values()))][1])
        parts = () if every is None else slices(every)
        found |= {name: parts[number] if number < len(parts) else None for number, name in members.items()}
    filled: Counter[str] = Counter()
    for name, view in found.items():
        attribute = sent[name][0].attribute
        live: Any = getattr(module, attribute, None)
        if view is None or view.untyped_storage().data_ptr() != live.untyped_storage().data_ptr():
            return {}
        filled[attribute] += view.numel()
    for attribute, tensor in tensors_of(module).items():
        padded = hasattr(module, "num_embeddings_padded")
        if tensor.numel() > 1 and not padded and filled[attribute] != tensor.numel():
            return {}
        if tensor.numel() == 1 and attribute not in filled:
            return {}
    return {name: view for name, view in found.items() if view is not None}


def repack(module: nn.Module, fill: Callable[[], None]) -> None:
    """Have vLLM repack one layer: its parameters take the checkpoint's layout, `fill` writes them, and the result is
    copied into the kernels' memory.
    """
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta

    info = layerwise.get_layerwise_info(module)
    parameters: dict[str, Tensor] = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    buffers = {name: tensor for name, tensor in module._buffers.items() if tensor is not None}
    info.kernel_tensors = parameters, buffers
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    released = [name for name, tensor in module._parameters.items() if tensor is None]  # by an earlier repacking
    try:
        restore_layer_on_meta(module, info)
        materialize_layer(module, info)
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        for name in DESCRIPTIVE & parameters.keys():
            getattr(module, name).data.copy_(parameters[name].data)  # the stream's lies on the host, which would wait
        fill()
        if not torch.cuda.is_available():  # as the reload does
            forget_kernels(module)
        module.quant_method.process_weights_after_loading(module)  # pyright: ignore
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()  # pyright: ignore
        layerwise._copy_and_restore_kernel_tensors(module, info)
    except BaseException:
        layerwise._place_kernel_tensors(module, info)
        raise
    finally:
        info.reset()
        for name in released:
            if not hasattr(module, name):
                module.register_parameter(name, None)


class DirectLoad:
    """One stream on its way along known routes.

    Args:
        live: the engine's model.
        routes: of its tensors.
        collector: of the receipts.
    """

    def __init__(self, live: "LiveModel", routes: Routes, collector: "ReceiptCollector") -> None:
        self.live, self.routes, self.collector, self.ledger = live, routes, collector, collector.ledger
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._copied: dict[nn.Module, list[str]] = {}

    def take(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load each module when all of its tensors are there."""
        for name, tensor in tensors:
            self._take(name, tensor)

    def finish(self) -> list[Fault]:
        """Take the receipts of what was copied, and return a fault for each module that stayed incomplete."""
        for module, names in self._copied.items():
            self.collector.take(names, memory_of(module))
        faults = []
        for module_name, group in self._waiting.items():
            places = [self.routes.places[name] for name in group]
            came = ", ".join(sorted({place.attribute for place in places}))
            faults.append(incomplete(module_name, lacking(places), came))
        return faults

    def _take(self, name: str, tensor: Tensor) -> None:
        sent, place = self.live.sent, self.routes.places.get(name)
        if place is None:
            self.ledger.record(name, tensor)
            self.ledger.unread.append(name)
        elif name in sent or place.attribute in DESCRIPTIVE:
            self.ledger.record(name, tensor)
        if place is None:
            self.ledger.faults.append(Fault("missing", name, "no module takes it"))
        if place is None or name in sent:
            return
        sent[name] = place, tuple(tensor.shape), tensor.dtype
        module_name = place.module_name
        group = self._waiting.setdefault(module_name, {})
        group[name] = tensor
        if len(group) == len(self.routes.members[module_name]):
            del self._waiting[module_name]
            self._land(place.module, module_name, group)

    def _land(self, module: nn.Module, module_name: str, group: dict[str, Tensor]) -> None:
        if not self.routes.copies(module_name):
            names = [name for name in group if self.routes.places[name].attribute not in DESCRIPTIVE]
            self.live.pending[module_name] = names
            repack(module, lambda: self._fill({name: group[name] for name in names}))
            return
        pairs = []
        for name, tensor in group.items():
            view = self.routes.views[name]
            if view.shape == tensor.shape:
                pairs.append((view, tensor))
                self._copied.setdefault(module, []).append(name)
            else:
                self.ledger.faults.append(Fault("shape", name, f"the engine's has {tuple(view.shape)}"))
        copy_all(pairs)

    def _fill(self, group: dict[str, Tensor]) -> None:
        """Write the tensors into the module's parameters; one that does not fit gets no receipt but a fault."""
        stacks = by_stack(group, self.live.sent)
        parameters = {place.attribute: getattr(place.module, place.attribute).data for place, _ in stacks}
        coming: Counter[str] = Counter()
        for name, tensor in group.items():
            coming[self.routes.places[name].attribute] += tensor.numel()
        for attribute, numbers in coming.items():
            if numbers < parameters[attribute].numel():  # of padding, which some kernels multiply, too
                parameters[attribute].zero_()
        for place, members in stacks:
            parameter, first = parameters[place.attribute], group[next(iter(members.values()))]
            if not isinstance(place, ExpertPlace):
                place.write(parameter, first)
            elif (every := place.cut_all(parameter, first.shape)) is not None:
                parts = slices(every)
                copy_all((parts[number], group[name]) for number, name in members.items() if number < len(parts))


def incomplete(module_name: str, left: list[str], came: str) -> Fault:
    """Return the fault of a module of which `left` did not come, or of which that alone came which `came` names."""
    return Fault("fused_group", module_name, f"without {listed(left, 8)}" if left else f"only {came} arrived")


def reloading(model: nn.Module, config: Any) -> ExitStack:
    """Begin a reload: modules take checkpoint tensors until it is closed, then hold repacked ones in the old memory.

    Closing it anywhere leaves layers which got nothing with their old weights.

    Args:
        model: vLLM's.
        config: of vLLM, which must be the current one here and at the end.
    """
    from vllm.model_executor.model_loader import reload

    with ExitStack() as begun:
        begun.enter_context(without_adapters(model))
        if not torch.cuda.is_available():
            forget_kernels(model)
        reload.initialize_layerwise_reload(model)
        begun.callback(_follow_convolutions, model)
        begun.callback(reload.finalize_layerwise_reload, model, config.model_config)
        return begun.pop_all()


def complete(module: nn.Module, tensors: int) -> None:
    """Have vLLM process a module of which all came that will come; nothing where it has, or does not know of all yet.

    It waits until the end of the reload for parameters that no checkpoint of ours fills, such as NVFP4's scales of
    activations or an order of columns, and holds what came for every such layer until then.

    Args:
        module: of vLLM's model.
        tensors: that came for it, but for the `DESCRIPTIVE`.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(module)
    if info.can_load() and sum(name not in DESCRIPTIVE for name, _ in info.loaded_weights) >= tensors > 0:
        layerwise._layerwise_process(module, info)
        layerwise.LOADING_LAYERS.discard(module)


def _follow_convolutions(model: nn.Module) -> None:
    """Write what each convolution of a state holds into the view of it that the forward pass reads.

    In bf16 a CPU packs the convolution's weight into other memory, so that the view, made before, would keep what the
    first start had: random numbers.
    """
    for module in model.modules():
        view, held = getattr(module, "conv_weights", None), getattr(module, "conv1d", None)
        unpacked = getattr(held, "_cpu_unpacked_conv_weight", None)
        if view is not None and unpacked is not None:
            view.copy_(unpacked)


def register_head_bias(model: nn.Module, network: Any) -> None:
    """Register the bias of an output head, where vLLM does so when the bias first comes.

    A reload puts back what was there when it began, and would drop the bias.

    Args:
        model: vLLM's.
        network: the learner's Hugging Face model.
    """
    if getattr(network.get_output_embeddings(), "bias", None) is None:
        return
    for module in model.modules():
        register = getattr(module, "_register_bias", None)
        if register is not None and getattr(module, "bias", None) is None:
            with torch.device(module.weight.device):  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
                register()


@contextmanager
def same_kernel(module: nn.Module) -> Iterator[None]:
    """Keep the kernel of a module of experts while its weights are packed anew, with the scales that it reads.

    vLLM makes another kernel, of the memory that it has just packed into, and then moves what is registered back to
    where it was. Captured graphs go on reading the former scales; of those that are not registered (NVFP4's global
    ones) they would never see a new number.
    """
    method: Any = getattr(module, "quant_method", None)
    kernel, config = getattr(method, "moe_kernel", None), getattr(method, "moe_quant_config", None)
    yield
    if kernel is None or config is None or method.moe_kernel is kernel:
        return
    held, made = _numbers_of(config), _numbers_of(method.moe_quant_config)
    shapes, wanted = ({name: tuple(tensor.shape) for name, tensor in one.items()} for one in (made, held))
    if shapes != wanted:
        raise RuntimeError(f"vLLM packed experts with scales {shapes}, and the kernel that runs reads {wanted}.")
    with torch.no_grad():
        for name, tensor in held.items():
            if tensor is not made[name]:
                tensor.copy_(made[name])
    method.moe_kernel, method.moe_quant_config = kernel, config


def _numbers_of(config: Any) -> Mapping[str, Tensor]:
    """Return the tensors that a kernel of experts reads beside the weights, by name."""
    parts = {name: part for name, part in vars(config).items() if hasattr(part, "__dict__")}
    found = {f"{name}.{key}": value for name, part in parts.items() for key, value in vars(part).items()}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


class ReceiptCollector:
    """Takes the receipts of one publish.

    Args:
        sent: place, shape and dtype of every tensor that came; it grows with the stream.
        ledger: for the receipts.
    """

    def __init__(self, sent: Sent, ledger: ReceivedLedger) -> None:
        self.sent, self.ledger = sent, ledger
        self._lost: list[tuple[list[str | None], Tensor]] = []

    def take(self, names: list[str], tensors: Mapping[str, Tensor]) -> None:
        """Take the receipts of what one module holds as it was sent.

        Args:
            names: of the checkpoint's tensors.
            tensors: the module's own, by attribute.
        """
        unfit: list[str] = []
        for place, members in by_stack(names, self.sent):
            _, shape, dtype = self.sent[next(iter(members.values()))]
            tensor = tensors.get(place.attribute)
            if tensor is not None:
                place.spread(tensor, shape)
            every = None if tensor is None else place.cut_all(tensor.detach(), shape)
            if every is None or max(members) >= len(every):
                unfit += members.values()
                continue
            numbered = [members.get(number) for number in range(len(every))]
            cut = narrowed(every, dtype)
            if cut is not every:
                self._lost.append((numbered, (cut.to(every.dtype) != every).reshape(len(every), -1).any(1)))
            if cut.dtype != dtype:
                cast = f"it came as {str(dtype).removeprefix('torch.')} and was cast"
                self.ledger.faults += [Fault("dtype", name, cast) for name in members.values()]
            self.ledger.record_stack(numbered, cut)
        detail = "its slice of the engine's parameter does not fit"
        self.ledger.faults += [Fault("shape", name, detail) for name in unfit]

    def check_digits(self) -> None:
        """Add a fault for each tensor whose module holds more than the dtype can that was sent; wait for the device."""
        names = [name for names, _ in self._lost for name in names]
        wrong = torch.cat([one for _, one in self._lost]).tolist() if self._lost else []
        lost = [name for name, bad in zip(names, wrong, strict=True) if bad and name is not None]
        detail = "it has digits that the sent dtype cannot hold"
        self.ledger.faults += [Fault("different", name, detail) for name in lost]


def by_stack(names: Iterable[str], sent: Sent) -> list[tuple[Place, dict[int, str]]]:
    """Return names by the stack that their tensors lie in side by side: one place, and by its number the name of each.

    Experts' matrices are numbered as their experts; any other tensor is a stack of one.

    Args:
        names: of the checkpoint's tensors.
        sent: their places, shapes and dtypes.
    """
    found: dict[Any, tuple[Place, dict[int, str]]] = {}
    for name in names:
        place, shape, dtype = sent[name]
        key, number = name, 0
        if isinstance(place, ExpertPlace):
            key, number = (place.attribute, place.part % place.beside, shape, dtype), place.expert
        found.setdefault(key, (place, {}))[1][number] = name
    return list(found.values())


COLUMNS = 8
"""Columns of the latent space in which a derived tensor is compared with its source, spread over all."""


def derived_names(module: nn.Module) -> set[str]:
    """Return the module's parameters that vLLM's own processing of attention made; no loader ever fills them."""
    if not callable(getattr(module, "process_weights_after_loading", None)):
        return set()
    made = {name for name, tensor in module._parameters.items() if tensor is not None}
    return made - restored_names(module) if made else set()


@torch.no_grad()
def derive_again(config: Any, modules: Mapping[str, nn.Module]) -> None:
    """Have vLLM make them of the weights that are there now, in the memory that captured CUDA graphs read."""
    for module in modules.values():
        module.process_weights_after_loading(config.model_config.dtype)  # pyright: ignore[reportCallIssue]


@torch.no_grad()
def stale_derived(
    modules: Mapping[str, nn.Module], columns_of: Callable[[nn.Module, Sequence[int]], Tensor | None]
) -> list[Fault]:
    """Return a fault for each piece of a latent attention that differs from the layer that it is made of.

    Args:
        modules: by name, with tensors that vLLM derived.
        columns_of: from a linear module and column indices to those columns ("out columns") as its GEMM sees them.
    """
    wrong: list[tuple[str, Tensor]] = []
    for name, module in modules.items():
        source: Any = getattr(module, "kv_b_proj", None)
        source = getattr(source, "base_layer", source)  # of an adapter's wrapper
        keys, values = (getattr(module, piece, None) for piece in ("W_UK_T", "W_UV"))
        if source is None or keys is None or values is None:
            continue
        heads, inner, latent = keys.shape
        step = max(latent // COLUMNS, 1)
        chosen = list(range(0, latent, step))[:COLUMNS]
        columns = columns_of(source, chosen)
        if columns is None:
            continue
        exact = type(getattr(source, "quant_method", None)).__name__.startswith("Unquantized")
        weight = columns.reshape(heads, -1, len(chosen)).float()
        for piece, held, expected in (
            ("W_UK_T", keys[:, :, chosen], weight[:, :inner]),
            ("W_UV", values[:, chosen].transpose(1, 2), weight[:, inner:]),
        ):
            share = share_of_bound(held.reshape(-1, len(chosen)), expected.reshape(-1, len(chosen)), exact)
            wrong.append((f"{name}.{piece}", (share > 1).any()))
    return _derived_faults(wrong)


@torch.no_grad()
def wrongly_computed(sent: dict[str, tuple[Place, Tensor]]) -> list[Fault]:
    """Return a fault for each parameter that is not what its loader makes of what was sent, and forget that.

    Args:
        sent: place and tensor by name.
    """
    wrong: list[tuple[str, Tensor]] = []
    for name, (place, tensor) in sent.items():
        held: Any = getattr(place.module, place.attribute)
        made, load = torch.empty_like(held.data), computing_loader(held)
        if load is not None:
            load(made, tensor.to(made.device))
            wrong.append((name, (made != held).any()))
    sent.clear()
    return _derived_faults(wrong)


def _derived_faults(wrong: list[tuple[str, Tensor]]) -> list[Fault]:
    """Return a fault for each name whose flag on the device is True; the host waits for it once."""
    found = torch.stack([flag for _, flag in wrong]).tolist() if wrong else []
    return [Fault("derived", name) for (name, _), flag in zip(wrong, found, strict=True) if flag]
