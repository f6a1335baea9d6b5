"""One stream of tensors to several engines in other processes: packed once for all that take it the same way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from lit_qrl.receipts.clock import Clock
from lit_qrl.receipts.ledger import Fault, PublishReport
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.remote.group import Group, Meeting
from lit_qrl.rollout.remote.replica import Replica
from lit_qrl.rollout.remote.transfer import (
    CHUNK,
    SLOTS,
    DeviceMemory,
    Memory,
    Named,
    SharedMemory,
    Way,
    pack,
    size_of,
    whole_bytes,
)


class Sender:
    """Sends streams; its memory stays from one publish to the next."""

    def __init__(self) -> None:
        self.ways: dict[Replica, Way] = {}
        self._memory: list[Memory] = []
        self._group: Group | None = None
        self._joined: list[Any] = []
        self._clock, self._sent, self._stages = Clock(), 0, False

    def publish(
        self,
        ways: dict[Replica, Way],
        what: str,
        tensors: Iterator[Named],
        args: Sequence[Any],
        until: Callable[[], None] | None = None,
    ) -> list[PublishReport]:
        """Return every replica's report of a stream.

        Args:
            ways: through which each replica takes tensors.
            what: the engines' method.
            tensors: names and tensors.
            args: that follow them.
            until: returns when the engines, which draw meanwhile, stand still; all tensors are sent before, and wait
                beside them. None where they stand still, and take each tensor as it comes.

        Raises:
            Exception: what the sender's stream or the first engine raised; the others are then told to give up.
        """
        self.ways, self._sent, self._clock, self._stages = ways, 0, Clock(), until is not None
        self._under_way: list[Any] = []  # tensors stay until they were taken
        told: set[Replica] = set()
        replicas = list(self.ways)
        if until is None:
            self._meet(replicas)
        try:
            for replica in replicas:
                replica.begin(what, *args) if until is None else replica.begin_staging()
            for chunk in chunks(tensors):
                self._send(chunk, told)
            while self._under_way:
                self._await(told)
            if until is not None:
                until()
            for replica in replicas:
                replica.end(whole=True) if until is None else replica.begin_taking(self._sent, what, *args)
                told.add(replica)
            with self._clock.part("await" if until is None else "take"):
                reports: list[PublishReport] = [replica.answer() for replica in replicas]
            for report in reports:
                report.parts = {**self._clock.seconds, **{f"engine_{one}": s for one, s in report.parts.items()}}
            return reports
        finally:
            self._under_way = []
            for replica in replicas:
                if until is None and replica not in told and not replica.dead:
                    with suppress(EngineDiedError):  # all of them hear of it
                        replica.end(whole=False)

    def joined(self, ways: dict[Replica, Way]) -> bool:
        """Return whether tensors can be sent without asking anything of the engines before."""
        present = [replica.connection for replica in ways]
        grouped = next(iter(ways.values())) in ("collective", "nccl")
        return not grouped or (self._group is not None and present == self._joined)

    def _meet(self, replicas: Sequence[Replica]) -> None:
        """Join all processes to one group where tensors go by it, anew where one of them is."""
        way = next(iter(self.ways.values()))
        if way not in ("collective", "nccl") or self.joined(self.ways):
            return
        self._leave()
        meeting, size = Meeting(), 1 + len(replicas)
        for number, replica in enumerate(replicas):
            replica.begin("join", (replica.address, meeting.port, meeting.name), 1 + number, size, way)
        try:
            self._group = Group(meeting.store, 0, size, way, replicas[0].address)
        except RuntimeError as error:
            raise EngineDiedError(f"The engines' processes did not join the group of the run: {error}") from error
        for replica in replicas:
            replica.answer()
        self._joined = [replica.connection for replica in replicas]

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _send(self, chunk: list[Named], told: set[Replica]) -> None:
        if len(self._under_way) == SLOTS:
            self._await(told)
        with self._clock.part("send"):
            self._hand_over(chunk)
        self._sent += 1
        self._under_way.append(chunk)

    def _hand_over(self, chunk: list[Named]) -> None:
        packed = {}
        for replica, way in self.ways.items():
            if way not in packed:
                packed[way] = pack(chunk, way, self._slot(chunk) if way in ("memory", "ipc") else None)
            replica.stage_chunk(*packed[way]) if self._stages else replica.send_chunk(*packed[way])
        if self._group is not None:
            try:
                self._group.broadcast(whole_bytes(chunk, self._group.backend))
            except EngineDiedError:
                self._leave()
                raise

    def _slot(self, chunk: list[Named]) -> Memory:
        """Return the memory of the next chunk: the GPU's, or the host's, whose pieces take turns."""
        if not self._memory:
            # What processes on the host take from memory must lie there for all of them.
            shared = set(self.ways.values()) - {"socket"} != {"ipc"}
            devices = [] if shared else [one.device for _, one in chunk if one.is_cuda]
            made = partial(DeviceMemory, devices[0]) if devices else SharedMemory
            self._memory = [made() for _ in range(SLOTS)]
        return self._memory[self._sent % SLOTS]

    def _await(self, told: set[Replica]) -> None:
        with self._clock.part("await"):
            for replica in self.ways:
                try:
                    replica.await_staged() if self._stages else replica.await_taken()
                except Exception:
                    told.add(replica)
                    raise
        self._under_way.pop(0)

    def close(self) -> None:
        """Give the memory back, and leave the group."""
        self._leave()
        memory, self._memory = self._memory, []
        for piece in memory:
            piece.close()


def chunks(tensors: Iterator[tuple[str, Tensor]], limit: int = CHUNK) -> Iterator[list[Named]]:
    """Yield a stream in parts of about `limit` bytes; a larger tensor is a part of its own.

    >>> import torch
    >>> [len(part) for part in chunks(iter([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(9))]), 16)]
    [2, 1]
    """
    part: list[Named] = []
    held = 0
    for name, tensor in tensors:
        if part and held + size_of(tensor) > limit:
            yield part
            part, held = [], 0
        part.append((name, tensor))
        held += size_of(tensor)
    if part:
        yield part


def as_one(reports: Sequence[PublishReport], names: Sequence[str]) -> PublishReport:
    """Return the first report, with a fault for whatever another replica holds otherwise.

    Args:
        reports: of the same stream, one of each replica.
        names: of the replicas.
    """
    first = reports[0]
    if first.received is None:
        return first
    held = first.received.receipts()
    for report, name in zip(reports[1:], names[1:], strict=True):
        other = report.received
        assert other is not None
        receipts = other.receipts()
        faults = [*other.faults]
        for key in dict.fromkeys([*held, *receipts]):
            if held.get(key) != receipts.get(key):
                kind = "missing" if key not in receipts else "extra" if key not in held else "different"
                faults.append(Fault(kind, key))
        if other.version != first.version:
            faults.append(Fault("version", "the engine"))
        first.received.prefix_reset &= other.prefix_reset
        place = f"the engine at {name}, beside that at {names[0]}"
        first.received.faults += [Fault(one.kind, one.name, one.detail or place) for one in faults]
    return first
