"""vLLM's weight transfer, by which every publish reaches the model: in this process, or in one behind vLLM's server.

`worker.py` registers it, and `weight_transfer_config` chooses it; what it does with the tensors is `LiveModel`'s.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (  # noqa: TID253  only vLLM's worker loads this module
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lit_qrl.receipts.ledger import ReceivedLedger
from lit_qrl.rollout.vllm.live_model import LiveModel
from lit_qrl.rollout.vllm.ways import receiver


@dataclass
class Opening(WeightTransferInitInfo):
    """How tensors will come from another process.

    Args:
        group: of a broadcast: address, port, number of this server's first worker, and size; None for other ways.
    """

    group: list[Any] | None = None


@dataclass
class Part(WeightTransferUpdateInfo):
    """A part of a publish.

    Args:
        version: of the publish.
        tensors: names and tensors, in the process that has them.
        packed: a description of them by a sender of `ways`, from another process.
    """

    version: int
    tensors: Any = None
    packed: dict[str, Any] | None = None


class LedgerTransfer(WeightTransferEngine[Opening, Part]):
    """Loads what comes into the live model, and keeps the ledger of it.

    What another process sent may be wrong, which is no end of this one: the error waits for who asks for the ledger.
    """

    init_info_cls, update_info_cls = Opening, Part
    live: LiveModel | None = None
    """The model; the worker's `connect` gives it."""
    ledger: ReceivedLedger = ReceivedLedger(-1)
    """Of the last publish."""
    error: Exception | None = None
    """What went wrong with what another process sent."""
    unpacked: Any = None

    def init_transfer_engine(self, init_info: Opening) -> None:
        """Be ready for tensors from another process."""
        self.unpacked = receiver(init_info.group, self.device, self.parallel_config.rank)

    def start_weight_update(self) -> None:
        """Begin a publish; one that was never finished is given up."""
        assert self.live is not None
        self.ledger, self.error = ReceivedLedger(-1), None
        self.live.begin(self.ledger)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take a part; without the base's wait for the device, which is at the receipts."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Part) -> None:
        assert self.live is not None
        self.ledger.version = update_info.version
        if update_info.packed is None:
            self.live.take(update_info.tensors)
        elif self.error is None:
            try:
                self.live.take(self.unpacked(update_info.packed))
            except Exception as error:
                self.error = error

    def finish_weight_update(self) -> None:
        """End a publish; the ledger then says what the model holds, or `error` why that is not known."""
        assert self.live is not None
        if self.error is not None:
            self.live.abandon()
            return
        try:
            self.live.finish()
        except Exception as error:
            self.error = error

    def shutdown(self) -> None:
        """Forget how tensors come."""
        self.unpacked = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Exist, as vLLM 0.26 asks: `ways` sends."""
        raise NotImplementedError
