"""Receipts of a publish: what was sent, what the engine holds, and every way in which the two differ.

Log-probs cannot show a stale layer: one AdamW step at a learning rate of 1e-5 moves them less than rounding does. So
each side keeps a ledger of the raw bits, and `compare` names the difference. Where an engine repacks weights, its GEMM
is asked for columns of them, and `column_bound` says what that product may round.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.numerics import not_finite
from lit_qrl.receipts.checksum import Checksums, dtype_name

FaultKind = Literal[
    "missing", "extra", "twice", "shape", "dtype", "stale", "swapped", "different", "non_finite", "version",
    "fused_group", "prefix_cache", "not_copied", "derived", "buffer", "read_back", "gemm", "probe",
]  # fmt: skip

EXPLANATIONS: dict[str, str] = {
    "missing": "was sent but did not reach the engine",
    "extra": "reached the engine but was not sent",
    "twice": "arrived more than once",
    "shape": "has another shape than was sent",
    "dtype": "has another dtype than was sent",
    "stale": "still holds the previous publish",
    "swapped": "holds another tensor of this publish",
    "different": "differs from what was sent",
    "non_finite": "is not finite",
    "version": "was stamped with another version",
    "fused_group": "is incomplete, and the engine would fill the rest with uninitialised memory",
    "prefix_cache": "was not reset, so the keys and values of the old weights would be used",
    "not_copied": "was repacked, but the engine's own copy does not hold the result",
    "derived": "is made by the engine of another tensor, and was not made again of the one that was sent",
    "buffer": "is no longer what the engine made when it was built, and no publish sends it",
    "read_back": "reads back differently from what was sent",
    "gemm": "is loaded, but the engine's GEMM computes with other values",
    "probe": "gets other log-probs from the engine than from the learner computing as the sampler should",
}


class TensorReceipt(NamedTuple):
    """What is remembered of one tensor; between processes a list in this order, of which `heard` makes one again.

    >>> TensorReceipt.heard([[4], "float32", 12, True]).shape
    (4,)
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: int
    finite: bool

    @classmethod
    def heard(cls, told: Sequence[Any]) -> "TensorReceipt":
        """Return the receipt that another process told of."""
        shape, *rest = told
        return cls(tuple(shape), *rest)


@dataclass(frozen=True, slots=True)
class Fault:
    """One difference between what was sent and what the engine holds.

    >>> print(Fault("missing", "model.norm.weight"))
    missing: model.norm.weight was sent but did not reach the engine.
    """

    kind: FaultKind
    name: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}: {self.name} {EXPLANATIONS[self.kind]}{detail}."


class PublishError(RuntimeError):
    """A publish that did not arrive as sent; `faults` lists every difference."""

    def __init__(self, faults: Sequence[Fault], version: int) -> None:
        self.faults, self.version = list(faults), version
        shown = "\n".join(f"  {fault}" for fault in self.faults[:8])
        more = f"\n  and {len(self.faults) - 8} more" if len(self.faults) > 8 else ""
        super().__init__(f"Publish {version} failed its verification:\n{shown}{more}")

    def __reduce__(self) -> tuple:
        return (PublishError, (self.faults, self.version))


class RefusedError(PublishError, ValueError):
    """A publish that one side refused before it could be compared, in that side's own words.

    Args:
        message: what is wrong, what was expected and given, and what to do.
        version: of the publish, where it is known.
    """

    def __init__(self, message: str, version: int = -1) -> None:
        RuntimeError.__init__(self, message)
        self.faults, self.version = [], version

    def __reduce__(self) -> tuple:
        return (RefusedError, (str(self), self.version))


class Ledger:
    """One side's record of a publish.

    Args:
        version: the version that this side believes it sends or holds.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.bytes = 0
        self._checksums = Checksums()
        self._described: dict[str, tuple[tuple[int, ...], str]] = {}
        self.sizes: dict[str, tuple[int, int]] = {}  # numbers and bytes by name
        self.repeated: list[str] = []  # names that were recorded more than once
        self._receipts: dict[str, TensorReceipt] | None = None

    def record(self, name: str, tensor: Tensor) -> None:
        """Remember one tensor under its checkpoint name; nothing is copied to the host."""
        self.bytes += tensor.nbytes
        if name in self._described:
            if name not in self.repeated:
                self.repeated.append(name)
            return
        self._described[name] = tuple(tensor.shape), dtype_name(tensor.dtype)
        self.sizes[name] = tensor.numel(), tensor.nbytes
        self._checksums.add(name, tensor)
        self._receipts = None

    def record_stack(self, names: Sequence[str | None], stack: Tensor) -> None:
        """Remember the slices of a stack, "slices …", as `record` does each of them; one without a name is left out."""
        found = [name for name in names if name is not None]
        if self._described.keys() & found or len(stack) < 2:
            for name, one in ((name, one) for name, one in zip(names, stack.unbind(), strict=True) if name is not None):
                self.record(name, one)
            return
        size = stack.nbytes // len(stack)
        self.bytes += size * len(found)
        self._described |= dict.fromkeys(found, (tuple(stack.shape[1:]), dtype_name(stack.dtype)))
        self.sizes |= dict.fromkeys(found, (stack.numel() // len(stack), size))
        self._checksums.add_stack(names, stack)
        self._receipts = None

    def receipts(self) -> dict[str, TensorReceipt]:
        """Return the receipts by name; this is the one transfer from the device."""
        if self._receipts is None:
            sums = self._checksums.finish()
            self._receipts = {name: TensorReceipt(*self._described[name], *sums[name]) for name in self._described}
        return self._receipts


class SentLedger(Ledger):
    """The sender's record; it refuses what is not finite and remembers columns of sampled layers.

    Args:
        version: the version being published.
        format: the format of the quantized layers, to dequantize the sampled ones.
        sampled: (out, in) of the layers (names without `.weight`) whose GEMM will be read back; see `choose`.
        columns: input columns remembered of each of them.
    """

    def __init__(
        self,
        version: int,
        format: NumberFormat | None = None,
        sampled: Mapping[str, tuple[int, int]] | None = None,
        columns: int = 4,
    ) -> None:
        super().__init__(version)
        self.format, self._shapes, self.sampled = format, dict(sampled or {}), dict(sampled or {})
        self.columns: dict[str, tuple[list[int], Tensor]] = {}
        self.dropped: dict[str, Tensor | float] = {}
        self._wanted = {layer: _draw(f"{version}:{layer}", shape[1], columns) for layer, shape in self.sampled.items()}
        self._parts: dict[str, Tensor] = {}

    def watch(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        share: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream unchanged; raise `ConfigError` for a tensor that is not finite.

        On a CPU that is at the tensor itself; on an accelerator at the end of the stream, so that the host waits once,
        and the engine, whose loading the error ends, has no weights to draw with until the next publish.

        Args:
            tensors: checkpoint names and tensors.
            share: from name and tensor to the part of it that the engine's process holds, which alone is recorded.
        """
        module = ""
        for name, tensor in tensors:
            layer, _, suffix = name.rpartition(".")
            if layer != module:
                self._close_module(module)
                module = layer
                if module in self.sampled:
                    outline = torch.empty(self._shapes[module], device="meta")  # a bias may come before its weight
                    rows, inputs = share(f"{module}.weight", outline).shape
                    self.sampled[module] = rows, inputs
            held = share(name, tensor)
            self.record(name, held)
            self._refuse_non_finite(wait=False)
            if module in self._wanted and suffix != "bias":
                self._parts[suffix] = held
            yield name, tensor
        self._close_module(module)
        self._refuse_non_finite(wait=True)

    def _close_module(self, module: str) -> None:
        if module in self._wanted and self._parts:
            weight, self.dropped[module] = self._dequantized(module)
            wanted = sorted({column % weight.shape[1] for column in self._wanted[module]})
            self.columns[module] = wanted, weight[:, torch.tensor(wanted, device=weight.device)].float().clone()
        self._parts = {}

    def _dequantized(self, module: str) -> tuple[Tensor, Tensor | float]:
        if self.format is None or set(self._parts) == {"weight"}:
            return self._parts["weight"], 0.0
        q = self.format.load(self._parts, self.sampled[module])
        return self.format.dequantize(q), self.format.dropped(q)

    def _refuse_non_finite(self, wait: bool) -> None:
        if (name := self._checksums.first_non_finite(wait)) is not None:
            raise not_finite(name)


@dataclass
class ReceivedLedger(Ledger):
    """The engine's record: the bits that its modules hold, and what it noticed itself.

    Args:
        version: the version that the engine stamps on completions from now on.
        prefix_reset: whether the engine's cache of prompt prefixes was emptied after the weights changed; an engine
            without such a cache leaves it True.
        faults: what the engine noticed while loading (incomplete fused groups, copies that did not happen).
        unread: names whose bits cannot be read back from the modules, such as experts'; nothing is said of them.
    """

    version: int
    prefix_reset: bool = True
    faults: list[Fault] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.version)

    def told(self) -> dict[str, Any]:
        """Return what an engine in another process tells of its ledger, as JSON has it."""
        return {
            "version": self.version,
            "bytes": self.bytes,
            "faults": [[one.kind, one.name, one.detail] for one in self.faults],
            "unread": self.unread,
            "twice": self.repeated,
            "receipts": {name: list(one) for name, one in self.receipts().items()},
        }

    @classmethod
    def heard(cls, told: Mapping[str, Any]) -> "ReceivedLedger":
        """Return the ledger that another process told of."""
        faults = [Fault(*one) for one in told["faults"]]
        ledger = cls(told["version"], faults=faults, unread=list(told["unread"]))
        ledger.repeated, ledger.bytes = list(told["twice"]), told["bytes"]
        ledger._receipts = {name: TensorReceipt.heard(one) for name, one in told["receipts"].items()}
        return ledger


@dataclass(slots=True, kw_only=True)
class PublishReport:
    """What one publish did.

    Args:
        version: the version now loaded.
        bytes: bytes of all tensors that were sent.
        layers: for every tensor name of the model, the name of the format actually loaded.
        received: what the engine's modules hold, to be compared with what was sent; None where it keeps no record.
        seconds: wall time of the whole publish, which whoever publishes takes.
        sizes: bytes that were sent of each of `layers`.
        quantized_share: share of the model's parameters that went out in a format of 8 bits or less.
        verified_share: share of the bytes sent whose receipts were compared with what the engine holds.
        parts: the host's seconds, by what they went into.
    """

    version: int
    bytes: int
    layers: dict[str, str]
    received: ReceivedLedger | None = None
    seconds: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)
    quantized_share: float = 0.0
    verified_share: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)


def compare(sent: Ledger, received: ReceivedLedger, previous: Mapping[str, TensorReceipt] | None = None) -> list[Fault]:
    """Return every difference between the two ledgers; an empty list is a publish verified but for what is `unread`.

    Args:
        sent: the sender's ledger.
        received: the engine's ledger.
        previous: receipts of the publish before, to tell a stale tensor from a garbled one.

    >>> sent, received = SentLedger(1), ReceivedLedger(1)
    >>> sent.record("model.norm.weight", torch.ones(4))
    >>> [str(fault) for fault in compare(sent, received)]
    ['missing: model.norm.weight was sent but did not reach the engine.']
    """
    out, back = sent.receipts(), received.receipts()
    owners: dict[int, str] = {receipt.checksum: name for name, receipt in out.items()}
    faults, unread = list(received.faults), set(received.unread)
    if received.version != sent.version:
        faults.append(Fault("version", "the engine", f"sent {sent.version}, stamped {received.version}"))
    if not received.prefix_reset:
        faults.append(Fault("prefix_cache", "the prefix cache"))
    faults += [Fault("twice", name) for name in sorted({*sent.repeated, *received.repeated})]
    faults += [Fault("missing", name) for name in out if name not in back and name not in unread]
    faults += [Fault("extra", name) for name in [*back, *(unread - back.keys())] if name not in out]
    for name, receipt in out.items():
        got = back.get(name)
        if got is None or name in unread or (got == receipt and got.finite):
            continue
        if not (receipt.finite and got.finite):
            faults.append(Fault("non_finite", name))
        elif got.shape != receipt.shape:
            faults.append(Fault("shape", name, f"sent {receipt.shape}, loaded {got.shape}"))
        elif got.dtype != receipt.dtype:
            faults.append(Fault("dtype", name, f"sent {receipt.dtype}, loaded {got.dtype}"))
        else:
            before = previous.get(name) if previous else None
            if before is not None and before.checksum == got.checksum:
                faults.append(Fault("stale", name))
            elif owners.get(got.checksum, name) != name:
                faults.append(Fault("swapped", name, f"that of {owners[got.checksum]}"))
            else:
                faults.append(Fault("different", name))
    return faults


def choose(layers: Collection[str], version: int, count: int = 4) -> list[str]:
    """Return `count` layers whose GEMM is read back at this version: all have their turn, in a fixed order.

    >>> choose(["a", "b", "c"], version=1, count=2)
    ['c', 'a']
    """
    names = list(layers)
    if len(names) <= count:
        return names
    return [names[(version * count + offset) % len(names)] for offset in range(count)]


def compare_columns(
    sent: SentLedger,
    read_columns: Callable[[str, Sequence[int]], Tensor | None],
    exact: bool,
) -> list[Fault]:
    """Return the sampled layers whose GEMM does not compute with the weights that were sent.

    Args:
        sent: the sender's ledger, after its stream was consumed.
        read_columns: from layer name and column indices to those columns of the weight ("out columns") as the
            engine's own GEMM sees them, in the dtype that it returns, or None where it cannot say.
        exact: True for plain weights; see `column_bound`.
    """
    faults = []
    for layer, (columns, expected) in sent.columns.items():
        got = read_columns(layer, columns)
        if got is None:
            continue
        if got.shape != expected.shape:
            faults.append(Fault("shape", f"{layer}.weight", f"sent {expected.shape[0]} rows, loaded {got.shape[0]}"))
            continue
        share = share_of_bound(got, expected, exact, sent.dropped[layer])
        wrong = float((share > 1).float().mean())
        if wrong > 0:
            much = f"by up to {float(share.max()):.2g} times what rounding may"
            faults.append(Fault("gemm", f"{layer}.weight", f"{wrong:.1%} of the sampled entries differ, {much}"))
    return faults


def read_receipts(read_back: Callable[[str], Tensor | None], names: Sequence[str]) -> dict[str, TensorReceipt]:
    """Return the receipts of what reads back under the names, taken where those tensors are.

    Args:
        read_back: the engine's.
        names: which tensors to read; one that is repacked has none.
    """
    again = Ledger(-1)
    for name in names:
        tensor = read_back(name)
        if tensor is not None:
            again.record(name, tensor)
    return again.receipts()


class Constants:
    """Receipts of what an engine computes with and no publish sends, such as tables of rotary embeddings.

    One that comes to have another shape or dtype was made anew, and counts as it is from then on.

    Args:
        named: returns them by name, as they are at the moment; asked for the first time at once.

    >>> held = {"rotary.inv_freq": torch.tensor([1.0, 0.1])}
    >>> constants = Constants(lambda: held)
    >>> held["rotary.inv_freq"][1] = 0.2
    >>> [str(fault) for fault in constants.faults()][0][:40]
    'buffer: rotary.inv_freq is no longer wha'
    """

    def __init__(self, named: Callable[[], Mapping[str, Tensor]]) -> None:
        self._named = named
        self._known = read_receipts(named().get, list(named()))

    def faults(self) -> list[Fault]:
        """Return a fault for each whose bits are others than they were; none is sought that came later."""
        faults = []
        for name, now in read_receipts(self._named().get, list(self._known)).items():
            known = self._known[name]
            if (now.shape, now.dtype) != (known.shape, known.dtype):
                self._known[name] = now
            elif now != known:
                faults.append(Fault("buffer", name))
        return faults


def compare_receipts(sent: Ledger, read: Mapping[str, TensorReceipt]) -> list[Fault]:
    """Return the tensors of which other receipts were read back than of what was sent."""
    out = sent.receipts()
    return [Fault("read_back", name) for name, receipt in read.items() if receipt != out.get(name)]


def _draw(key: str, size: int, count: int) -> list[int]:
    digest = hashlib.sha256(key.encode()).digest()
    return sorted({int.from_bytes(digest[4 * i : 4 * i + 4], "little") % size for i in range(min(count, 8))})


SHORTENED = {"highest": 0.0, "high": 2.0**-11, "medium": 2.0**-8}
"""By what share fp32 may be rounded before it is multiplied, by `torch.get_float32_matmul_precision()`."""


def column_bound(weight: Tensor, dtype: torch.dtype, exact: bool) -> Tensor:
    """Return by how much a GEMM with a unit vector may miss each entry of a weight, from its arithmetic alone.

    All terms of such a product but one are zeros, so neither the order nor the length of the sum rounds, on whatever
    instructions. A plain weight comes back bit for bit, but for what matrix units take for zero (below 2⁻¹²⁶), and but
    for the digits that torch was told to leave out of fp32. A quantized one is rounded at most three times in `dtype`
    (code times the block's scale, times the layer's, the result) and five times in fp32 (the activations' scale, two
    products with scales, two in what it is compared with): by u |w| each time, where u is half the dtype's epsilon, and
    below the dtype's smallest normal number by u times that number.

    Args:
        weight: "out columns", fp32, as it was sent.
        dtype: of the GEMM's result.
        exact: True for a plain weight.

    >>> [float(column_bound(torch.ones(1, 1), torch.bfloat16, exact)) for exact in (False, True)]
    [0.011719048023223877, 1.1754943508222875e-38]
    """
    bound = torch.full_like(weight, torch.finfo(torch.float32).tiny)
    if dtype == torch.float32:
        bound += SHORTENED[torch.get_float32_matmul_precision()] * weight.abs()
    if exact:
        return bound
    for times, rounded in ((3, torch.finfo(dtype)), (5, torch.finfo(torch.float32))):
        bound += times * rounded.eps / 2 * weight.abs().clamp_min(rounded.tiny)
    return bound


def share_of_bound(got: Tensor, weight: Tensor, exact: bool, dropped: Tensor | float = 0.0) -> Tensor:
    """Return for each entry how far the engine's GEMM is from the weight, as a share of `column_bound`.

    Args:
        got: "out columns", in the dtype that the GEMM returns.
        weight: the same columns as they were sent, fp32.
        exact: True for a plain weight.
        dropped: magnitude below which a weight may be taken for 0; see `NumberFormat.dropped`.
    """
    bound, got = column_bound(weight, got.dtype, exact), got.to(weight)  # which may come from another device
    share = (got - weight).abs() / bound
    return share.nan_to_num(nan=torch.inf).masked_fill_((got == 0) & (weight.abs() < dropped), 0.0)
