"""Receipts of what vLLM's modules hold of a stream, taken of whole stacks where experts lie side by side."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_qrl.receipts.checksum import slice_of, slices
from lit_qrl.receipts.ledger import Fault, ReceivedLedger
from lit_qrl.rollout.vllm.locations import WIDENED, ExpertPlace, Sent, narrowed


class Held:
    """Takes the receipts of one publish.

    Args:
        sent: place, shape and dtype of every tensor that came; it grows with the stream.
        ledger: for the receipts.
    """

    def __init__(self, sent: Sent, ledger: ReceivedLedger) -> None:
        self.sent, self.ledger = sent, ledger
        self._narrower = Narrower()

    def note(self, name: str, held: Tensor) -> None:
        """Take the receipt of what a module holds of a tensor."""
        cut = self._narrower.of(name, held, self.sent[name][2])
        self._check_dtype([name], cut.dtype)
        self.ledger.record(name, cut)

    def take(self, names: list[str], tensors: Mapping[str, Tensor]) -> None:
        """Take the receipts of what one module holds, before it is repacked.

        Args:
            names: of the checkpoint's tensors.
            tensors: the module's own, by attribute.
        """
        unfit: list[str] = []
        for place, experts in by_stack(names, self.sent):
            _, shape, dtype = self.sent[next(iter(experts.values()))]
            tensor = tensors.get(place.attribute)
            every = None if tensor is None else place.cut_all(tensor.detach(), shape)
            if every is None or max(experts) >= len(every):
                unfit += experts.values()
                continue
            numbered = [experts.get(number) for number in range(len(every))]
            cut = self._narrower.of_stack(numbered, every, dtype)
            self._check_dtype(list(experts.values()), cut.dtype)
            self.ledger.record_stack(numbered, cut)
        for name in names:
            place, shape, _ = self.sent[name]
            if isinstance(place, ExpertPlace):
                continue
            tensor = tensors.get(place.attribute)
            if tensor is not None:
                place.spread(tensor, shape)
            cut = None if tensor is None else place.cut(tensor, shape)
            if cut is None:
                unfit.append(name)
            else:
                self.note(name, cut)
        detail = "its slice of the engine's parameter does not fit"
        self.ledger.faults += [Fault("shape", name, detail) for name in unfit]

    def _check_dtype(self, names: list[str], held: torch.dtype) -> None:
        if (dtype := self.sent[names[0]][2]) != held:
            detail = f"it came as {str(dtype).removeprefix('torch.')} and was cast"
            self.ledger.faults += [Fault("dtype", name, detail) for name in names]

    def check_digits(self) -> None:
        """Add a fault for each tensor whose module holds more than the dtype can that was sent."""
        detail = "it has digits that the sent dtype cannot hold"
        self.ledger.faults += [Fault("different", name, detail) for name in self._narrower.lost()]


def by_stack(names: Iterable[str], sent: Sent) -> list[tuple[ExpertPlace, dict[int, str]]]:
    """Return the experts' matrices among some names by the stack that they lie in side by side: one place, and by the
    number of its expert the name of each.

    Args:
        names: of the checkpoint's tensors.
        sent: their places, shapes and dtypes.
    """
    found: dict[tuple[Any, ...], tuple[ExpertPlace, dict[int, str]]] = {}
    for name in names:
        place, shape, dtype = sent[name]
        if isinstance(place, ExpertPlace):
            key = place.attribute, place.part % place.beside, shape, dtype
            if key not in found:
                found[key] = place, {}
            found[key][1][place.expert] = name
    return list(found.values())


class Narrower:
    """Returns what `narrowed` does, of whole stacks at once (`checksum.slices`), and knows what lost digits."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[int, torch.dtype], tuple[Tensor, tuple[Tensor, ...], list[str | None]]] = {}
        self._lost: list[tuple[list[str | None], Tensor]] = []

    def of(self, name: str, held: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor that the engine holds in the dtype that was sent.

        Args:
            name: of the checkpoint.
            held: by the engine; where it is a slice, the others of its stack are final too.
            dtype: that was sent.
        """
        if (dtype, held.dtype) not in WIDENED:
            return held
        found = slice_of(held)
        if found is None:
            return self.of_stack([name], held.unsqueeze(0), dtype)[0]
        key = id(found.stack), dtype
        if key not in self._stacks:
            names: list[str | None] = [None] * len(found.stack)
            self._stacks[key] = found.stack, slices(self.of_stack(names, found.stack, dtype)), names
        _, parts, names = self._stacks[key]
        names[found.index] = name
        return parts[found.index]

    def of_stack(self, names: list[str | None], stack: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a stack in the dtype that its slices were sent in; `names` are theirs, None where nothing came."""
        cut = narrowed(stack, dtype)
        if cut is not stack:
            self._lost.append((names, (cut.to(stack.dtype) != stack).reshape(len(stack), -1).any(1)))
        return cut

    def lost(self) -> list[str]:
        """Return the names of tensors with digits that the sent dtype cannot hold; the host waits for the device."""
        names = [name for names, _ in self._lost for name in names]
        wrong = torch.cat([one for _, one in self._lost]).tolist() if self._lost else []
        return [name for name, bad in zip(names, wrong, strict=True) if bad and name is not None]
