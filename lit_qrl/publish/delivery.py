"""One stream to the engine, and the comparison of what was sent with what it holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from lit_qrl.errors import within_memory
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.dense import Dense
from lit_qrl.publish.shares import weigh
from lit_qrl.receipts.clock import Clock, gc_pause
from lit_qrl.receipts.ledger import (
    PublishError,
    PublishReport,
    SentLedger,
    TensorReceipt,
    choose,
    compare,
    compare_columns,
    compare_read_back,
    compare_receipts,
)
from lit_qrl.rollout.engine import HoldsShare, ReadsBack, ReadsColumns, RolloutEngine, TakesAdapter

Stream = Iterator[tuple[str, Tensor]]


@runtime_checkable
class ReadsReceipts(Protocol):
    """An engine apart, whose loaded tensors stay where they are when they are read again."""

    def read_receipts(self, names: Sequence[str]) -> dict[str, TensorReceipt]:
        """Return the receipts of those that its `read_back` has."""
        ...


@runtime_checkable
class Stages(Protocol):
    """An engine apart that is sent weights while it draws with others."""

    def staged(self, until: Callable[[], None]) -> AbstractContextManager[None]:
        """Within it the first stream of weights is sent at once, and replaces those of the engine after `until`.

        Args:
            until: returns when nothing is drawn any more, or raises; called once, after the stream's last tensor.
        """
        ...


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

    @gc_pause()  # the sender's receipts and the comparison make as many objects as the engine
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
        share = self.engine.own_part if isinstance(self.engine, HoldsShare) else None
        clock = Clock()
        made = clock.stream("make", self._made(sent, share, stream))
        with clock.part("load"):
            report = self.engine.load_weights(made, format, version)
        report.parts = {"make": clock.seconds["make"], **(report.parts or {"load": clock.seconds["load"]})}
        with clock.part("compare"):
            self._compare(sent, report, format, whole=True)
        report.parts["compare"] = clock.seconds["compare"]
        low = format is not None and not isinstance(format, Dense)
        weigh(report, sent, shapes if low else {})
        return report

    def _made(self, sent: SentLedger, share: Any, stream: Stream) -> Stream:
        yield from sent.watch(self.engine.arranged(stream), share)
        if isinstance(self.engine, Stages):  # so that nothing of them waits for the engine to stand still
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
                if isinstance(self.engine, ReadsColumns):
                    faults += compare_columns(sent, self.engine.read_columns, exact=sent.format is None)
                names = list(sent.receipts())
                few = names[:: max(len(names) // 4, 1)]
                if isinstance(self.engine, ReadsReceipts):
                    faults += compare_receipts(sent, self.engine.read_receipts(few))
                elif isinstance(self.engine, ReadsBack):
                    faults += compare_read_back(sent, self.engine.read_back, few)
            if faults:
                raise PublishError(faults, sent.version)
            self._receipts[kind] = sent.receipts()
