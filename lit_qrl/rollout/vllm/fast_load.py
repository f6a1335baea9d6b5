"""Loading without vLLM's reload, once a first one has shown where every checkpoint tensor ends up.

A tensor that lies in the kernels' memory as it was sent is copied there, which the receipts of the first reload prove
bit by bit, and every later receipt is taken from that memory. A layer that its method repacks goes through the same
repacking as in a reload, layer by layer, without the loaders that count what arrived.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lit_qrl.errors import listed
from lit_qrl.formats import support
from lit_qrl.receipts.checksum import Checksums
from lit_qrl.receipts.ledger import Fault, ReceivedLedger, TensorReceipt
from lit_qrl.rollout.vllm.held import Narrower, by_stack
from lit_qrl.rollout.vllm.locations import (
    DESCRIPTIVE,
    Cutter,
    ExpertPlace,
    Place,
    Sent,
    copy_all,
    copy_into,
    lacking,
    tensors_of,
)
from lit_qrl.rollout.vllm.upkeep import forget_kernels


class Receiver(Protocol):
    """The engine's model as a stream meets it: what came, what waits for its receipt, and the receipts."""

    llm: Any
    sent: dict[str, tuple[Place, tuple[int, ...], torch.dtype]]
    pending: dict[str, list[str]]

    def note(self, name: str, held: Tensor) -> None: ...


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
    sums, narrower = Checksums(), Narrower()
    for names in members.values():
        module = places[next(iter(names))].module
        found = _views({name: sent[name] for name in names}, module) if _reads_its_tensors(module) else {}
        views |= found
        for name, view in found.items():
            sums.add(name, narrower.of(name, view, sent[name][2]))
    same = {name: name in receipts and receipts[name].checksum == value for name, (value, _) in sums.finish().items()}
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


def _views(sent: Sent, module: nn.Module) -> dict[str, Tensor]:
    """Return the module's memory of each tensor sent; nothing unless they make up all that it holds."""
    found: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    cutter = Cutter()
    for name, (place, shape, _) in sent.items():
        live = getattr(module, place.attribute, None)
        if live is None or live.numel() == 0:
            return {}
        live = live.data
        turned = live.t() if live.ndim == 2 and not live.is_contiguous() else live
        view = cutter.cut(place, turned, shape) if turned.is_contiguous() else None
        if view is None or view.untyped_storage().data_ptr() != live.untyped_storage().data_ptr():
            return {}
        found[name] = view
        filled[place.attribute] = filled.get(place.attribute, 0) + view.numel()
    for attribute, tensor in tensors_of(module).items():
        padded = hasattr(module, "num_embeddings_padded")
        if tensor.numel() > 1 and not padded and filled.get(attribute, 0) != tensor.numel():
            return {}
        if tensor.numel() == 1 and attribute not in filled:
            return {}
    return found


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
        live: the engine's model; it takes the receipts.
        routes: of its tensors.
        ledger: for the receipts.
    """

    def __init__(self, live: Receiver, routes: Routes, ledger: ReceivedLedger) -> None:
        self.live, self.routes, self.ledger = live, routes, ledger
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._copied: list[str] = []

    @torch.no_grad()
    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> list[Fault]:
        """Load each module when all of its tensors are there; return a fault for each that stayed incomplete."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.live.llm.llm_engine.vllm_config):
            for name, tensor in tensors:
                self._take(name, tensor)
        for name in self._copied:
            self.live.note(name, self.routes.views[name])
        return [self._incomplete(module_name, group) for module_name, group in self._waiting.items()]

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
                self._copied.append(name)
            else:
                self.ledger.faults.append(Fault("shape", name, f"the engine's has {tuple(view.shape)}"))
        copy_all(pairs)

    def _fill(self, group: dict[str, Tensor]) -> None:
        """Write the tensors into the module's parameters; one that does not fit gets no receipt but a fault."""
        stacks, places = by_stack(group, self.live.sent), self.routes.places
        held = {place.attribute: place for place in (places[name] for name in group)}
        parameters = {name: getattr(place.module, name).data for name, place in held.items()}
        coming: Counter[str] = Counter()
        for place, experts in stacks:
            coming[place.attribute] += len(experts) * group[next(iter(experts.values()))].numel()
        for attribute, numbers in coming.items():
            if numbers < parameters[attribute].numel():  # of padding, which some kernels multiply, too
                parameters[attribute].zero_()
        for place, experts in stacks:
            every = place.cut_all(parameters[place.attribute], group[next(iter(experts.values()))].shape)
            if every is not None:
                copy_into(every, {expert: group[name] for expert, name in experts.items() if expert < len(every)})
        for name, tensor in group.items():
            place = places[name]
            if isinstance(place, ExpertPlace):
                continue
            parameter = parameters[place.attribute]
            if hasattr(place.module, "num_embeddings_padded"):
                parameter[tensor.shape[0] :].zero_()  # as vLLM's loader does
            place.write(parameter, tensor)

    def _incomplete(self, module_name: str, group: dict[str, Tensor]) -> Fault:
        places = [self.routes.places[name] for name in group]
        left, came = lacking(places), sorted({place.attribute for place in places})
        detail = f"without {listed(left, 8)}" if left else f"only {', '.join(came)} arrived"
        return Fault("fused_group", module_name, detail)
