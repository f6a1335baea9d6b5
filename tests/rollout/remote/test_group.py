"""A group of a run and its engines: what one sends all get, and a process that is missing is told of."""

import threading
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.remote.group import Group, Meeting, join, local_address
from lit_qrl.rollout.remote.wire import listen


def test_bytes_reach_all_and_who_leaves_is_missed():
    meeting, got = Meeting(), {}

    def other(rank):
        group = Group(join("127.0.0.1", meeting.port, meeting.name), rank, 3, "collective", "127.0.0.1")
        got[rank] = torch.zeros(5, dtype=torch.uint8)
        group.broadcast(got[rank])
        group.close()

    threads = [threading.Thread(target=other, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    group = Group(meeting.store, 0, 3, "collective", "127.0.0.1")
    sent = torch.arange(5, dtype=torch.uint8)
    group.broadcast(sent)
    for thread in threads:
        thread.join()
    assert torch.equal(got[1], sent)
    assert torch.equal(got[2], sent)
    with pytest.raises(EngineDiedError, match="did not reach"):
        group.broadcast(torch.zeros(2**26, dtype=torch.uint8))  # more than a socket takes when nobody reads
    group.close()


def test_the_address_is_the_one_that_the_other_side_sees():
    import socket

    listener = listen("127.0.0.1", 0)
    with socket.create_connection(listener.getsockname()) as near:
        assert local_address(SimpleNamespace(fileno=near.fileno)) == "127.0.0.1"
    listener.close()
