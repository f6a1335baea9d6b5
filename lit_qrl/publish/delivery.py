"""One stream to the engine, the comparison of what was sent with what it holds, and what is told of both."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_qrl.errors import listed, within_memory
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.precision.source import Change, WeightSource
from lit_qrl.receipts.clock import Clock
from lit_qrl.receipts.ledger import (
    Ledger,
    PublishError,
    PublishReport,
    SentLedger,
    TensorReceipt,
    choose,
    compare,
    compare_columns,
    compare_receipts,
)
from lit_qrl.rollout.engine import LendsWeights, Pauses, RolloutEngine, TakesAdapter
from lit_qrl.run.event_log import tell
from lit_qrl.run.imports import uncollected

Stream = Iterator[tuple[str, Tensor]]


class Delivery:
    """Hands streams of tensors to one engine, from its start to its death, and raises where they did not arrive.

    It keeps the receipts of the previous publish, which tell a tensor that stayed from one that was garbled.

    Args:
        engine: that receives.
        timed: a context manager that adds the seconds of a phase to the iteration's.
    """

    def __init__(self, engine: RolloutEngine, timed: Callable[[str], AbstractContextManager[None]]) -> None:
        self.engine, self._timed = engine, timed
        self._receipts: dict[Any, dict[str, TensorReceipt]] = {}

    @uncollected()
    def weights(
        self, stream: Stream, format: NumberFormat | None, shapes: Mapping[str, tuple[int, int]], version: int
    ) -> PublishReport:
        """Replace all weights, and look into a few layers that the receipts cannot see into.

        Args:
            stream: checkpoint names and tensors.
            format: of the quantized layers.
            shapes: (out, in) of the layers whose GEMM may be asked for columns.
            version: of the publish.

        Raises:
            PublishError: for every difference between what was sent and what the engine holds.
        """
        sampled = {name: shapes[name] for name in choose(list(shapes), max(version, 0))}
        sent = SentLedger(version, format, sampled)
        clock = Clock()
        made = clock.stream("make", self._made(sent, stream))
        with clock.part("load"):
            report = self.engine.load_weights(made, format, version)
        report.parts = {"make": clock.seconds["make"], **(report.parts or {"load": clock.seconds["load"]})}
        with clock.part("compare"):
            self._compare(sent, report, format, whole=True)
        report.parts["compare"] = clock.seconds["compare"]
        low = format is not None and not isinstance(format, Dense)
        weigh(report, sent, shapes if low else {})
        return report

    def _made(self, sent: SentLedger, stream: Stream) -> Stream:
        yield from sent.watch(self.engine.arranged(stream), self.engine.own_part)
        if isinstance(self.engine, Pauses):  # so that nothing of them waits for the engine to stand still
            sent.receipts()

    def part(self, kind: Literal["adapter", "norms"], stream: Stream, version: int) -> PublishReport:
        """Replace the adapter beside the base, or the given norms over it; raises as `weights` does."""
        engine = self.engine
        assert isinstance(engine, TakesAdapter)
        sent = SentLedger(version)
        report = (engine.load_adapter if kind == "adapter" else engine.perturb)(sent.watch(stream), version)
        self._compare(sent, report, kind, whole=False)
        return report

    def _compare(self, sent: SentLedger, report: PublishReport, kind: Any, whole: bool) -> None:
        if report.received is None:
            return
        remedy = "Lower the engine's share of the device: verifying takes copies of a few layers."
        with self._timed("verify"), within_memory("reading back what the engine holds", remedy):
            faults = compare(sent, report.received, self._receipts.get(kind))
            if whole:
                self._receipts.clear()
                faults += compare_columns(sent, self.engine.read_columns, exact=sent.format is None)
                names = list(sent.receipts())
                faults += compare_receipts(sent, self.engine.read_receipts(names[:: max(len(names) // 4, 1)]))
            if faults:
                raise PublishError(faults, sent.version)
            self._receipts[kind] = sent.receipts()


def weigh(report: PublishReport, sent: Ledger, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Write sizes and shares into the report of a whole publish.

    Args:
        report: of the engine.
        sent: the sender's ledger.
        shapes: (out, in) of the layers that went out in a format of 8 bits or less.
    """
    read = set() if report.received is None else set(sent.sizes) - set(report.received.unread)
    whole = sum(size for _, size in sent.sizes.values())
    report.verified_share = sum(sent.sizes[name][1] for name in read) / max(whole, 1)
    quantized, plain = sum(math.prod(shape) for shape in shapes.values()), 0
    for name, (numbers, size) in sent.sizes.items():
        layer = name.partition(".weight")[0]
        if layer not in shapes or name == f"{layer}.bias":
            plain += numbers
        key = name if name in report.layers else f"{layer}.weight"
        report.sizes[key] = report.sizes.get(key, 0) + size
    report.quantized_share = quantized / max(quantized + plain, 1)


def loaded(report: PublishReport) -> str:
    """Return the formats that the sampler was loaded in, the one with most bytes first.

    >>> layers, sizes = {"a.weight": "int4_group", "norm": "fp32"}, {"a.weight": 10, "norm": 4}
    >>> loaded(PublishReport(version=0, seconds=0.1, bytes=14, layers=layers, sizes=sizes))
    'int4_group, the rest fp32'
    """
    sizes = Counter[str]()
    for name, format in report.layers.items():
        sizes[format] += report.sizes.get(name, 0)
    first, *rest = [format for format, _ in sizes.most_common()] or [""]
    return f"{first}, the rest {' and '.join(rest)}" if rest else first


@rank_zero_only
def write_layers(folder: Path, report: PublishReport) -> None:
    """Write `publish.json`: the format that every tensor of the first publish was loaded in, its bytes, the shares."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = ("version", "bytes", "quantized_share", "verified_share", "layers", "sizes")
    unverified = [] if report.received is None else report.received.unread
    content = {**{key: getattr(report, key) for key in keys}, "unverified": unverified}
    (folder / "publish.json").write_text(json.dumps(content, indent=1))


def tell_shares(trainer: Trainer, format: NumberFormat | None, report: PublishReport) -> None:
    """Print, and note in the diary, how much of the model the sampler has in the format and how much was verified."""
    what = "the learner's dtype" if format is None else format.name
    share = 1.0 if format is None or isinstance(format, Dense) else report.quantized_share
    unread = [] if report.received is None else report.received.unread
    left = f", not {listed(unread, 2)}" if report.verified_share < 1 and unread else ""
    matched = f"checksums of {report.verified_share:.1%} of the bytes match{left}"
    line = f"Sampler: {share:.1%} of the parameters in {what}; {matched}."
    shares = {"quantized_share": report.quantized_share, "verified_share": report.verified_share}
    tell(trainer, "sampler", line, **shares)


class AdapterBeside:
    """Publishes a base once, and from then on what differs from it: norms that callbacks change, and the adapter.

    Args:
        source: of the run's weights.
        delivery: to the engine.
    """

    def __init__(self, source: WeightSource, delivery: Delivery) -> None:
        self.source, self.delivery = source, delivery
        # What the engine holds: the base's state and layers, and which norms differ from it.
        self._base: tuple[Any, PublishReport] | None = None
        self._perturbed: set[str] = set()

    def forget(self) -> None:
        """Send the base again at the next publish, whatever the engine holds."""
        self._base = None

    def publish(self, change: Change, version: int) -> PublishReport:
        """Publish the base where the engine does not hold it, then what differs; return the report of all.

        Args:
            change: of the norms.
            version: of the publish.
        """
        source, engine = self.source, self.delivery.engine
        dtype, sent = source.plain_dtype(engine.plain_dtype), 0
        state = source.base_state()
        if self._base is None or self._base[0] != state:
            self._base, self._perturbed = None, set()
            report = self.delivery.weights(source.base(dtype), source.format, source.shapes, version)
            if isinstance(engine, LendsWeights):
                source.settle(engine)
            self._base, sent = (source.base_state(), report), report.bytes
        changed = source.changed_norms(change)
        restored = source.norms(self._perturbed - changed.keys())
        if changed or restored:
            norms = ((name, tensor.to(dtype)) for name, tensor in {**restored, **changed}.items())
            self._perturbed |= changed.keys()
            sent += self.delivery.part("norms", norms, version).bytes
            self._perturbed = set(changed)
        report = self.delivery.part("adapter", source.adapter(engine.plain_dtype), version)
        base = self._base[1]
        report.layers, report.sizes = {**base.layers, **report.layers}, base.sizes
        report.quantized_share, report.verified_share = base.quantized_share, base.verified_share
        report.bytes += sent
        return report
