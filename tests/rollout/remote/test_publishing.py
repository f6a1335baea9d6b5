"""Streams cut into chunks, and reports of several engines made one."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.receipts.ledger import PublishReport, ReceivedLedger
from lit_qrl.rollout.remote.publishing import Sender, as_one, chunks
from lit_qrl.rollout.remote.transfer import DeviceMemory, SharedMemory


def report(version=3, **tensors):
    ledger = ReceivedLedger(version)
    for name, tensor in tensors.items():
        ledger.record(name, tensor)
    return PublishReport(version=version, seconds=1.0, bytes=8, layers={}, received=ledger)


def test_chunks_hold_every_tensor_once_in_order():
    tensors = [(str(i), torch.zeros(i)) for i in range(9)]
    parts = list(chunks(iter(tensors), 40))
    assert [name for part in parts for name, _ in part] == [name for name, _ in tensors]
    assert all(len(part) == 1 or sum(4 * len(t) for _, t in part) <= 40 for part in parts)


def test_reports_that_agree_are_the_first():
    one, two = report(a=torch.ones(2)), report(a=torch.ones(2))
    assert as_one([one, two], ["x", "y"]) is one
    assert one.received.faults == []


def test_every_difference_of_another_replica_is_a_fault():
    one = report(a=torch.ones(2), b=torch.ones(1))
    two = report(4, a=torch.zeros(2), c=torch.ones(1))
    two.received.prefix_reset = False
    faults = as_one([one, two], ["x", "y"]).received.faults
    assert {(fault.kind, fault.name) for fault in faults} == {
        ("different", "a"),
        ("missing", "b"),
        ("extra", "c"),
        ("version", "the engine"),
    }
    assert all("the engine at y" in fault.detail for fault in faults)
    assert not one.received.prefix_reset


@pytest.mark.parametrize(
    ("ways", "kind"),
    [
        (["ipc"], DeviceMemory),
        (["ipc", "socket"], DeviceMemory),
        (["memory"], SharedMemory),
        (["ipc", "memory"], SharedMemory),
    ],
)
def test_tensors_of_a_gpu_lie_where_all_who_take_them_can_see_them(ways, kind):
    sender = Sender()
    sender.ways = dict(enumerate(ways))
    chunk = [("a", SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)))]
    assert isinstance(sender._slot(chunk), kind)
