"""Two conversations over one connection, and its end, which both hear of."""

import multiprocessing
import threading

import pytest
import torch

from lit_qrl.rollout.remote.duplex import Duplex


def test_what_comes_beside_is_apart_from_the_rest_and_keeps_its_order():
    near, far = (Duplex(one) for one in multiprocessing.Pipe())
    for message in [(1, "a"), ("staged", 2, None), (3, "b"), ("unstaged", 4, None)]:
        near.send(message)
    assert [far.receive() for _ in range(2)] == [(1, "a"), (3, "b")]
    assert [far.receive(beside=True) for _ in range(2)] == [("staged", 2, None), ("unstaged", 4, None)]
    assert not far.poll()


def test_pieces_of_memory_follow_their_message():
    near, far = (Duplex(one) for one in multiprocessing.Pipe())
    pieces = [torch.arange(3, dtype=torch.uint8).numpy(), torch.ones(2).numpy()]
    near.send(("chunk", "header"), pieces)
    near.send(("chunk", "another"), [])
    kind, header, following = far.receive()
    assert (kind, header, [bytes(one) for one in following]) == ("chunk", "header", [one.tobytes() for one in pieces])
    assert far.receive() == ("chunk", "another", [])


def test_who_takes_what_comes_beside_is_called_while_nobody_receives():
    near, far = multiprocessing.Pipe()
    came, seen = threading.Event(), []

    def take(message):
        seen.append(message)
        came.set()

    far = Duplex(far, take)
    Duplex(near).send(("stage", 1, "header"), [b"ab"])
    assert came.wait(60)
    assert seen == [("stage", 1, "header", [bytearray(b"ab")])]
    assert not far.poll()


def test_a_message_that_cannot_be_read_is_raised_once_and_an_end_to_everybody():
    near, far = multiprocessing.Pipe()
    far = Duplex(far)
    near.send_bytes(b"no pickle")
    with pytest.raises(Exception, match=r"pickle|unpack|key|opcode"):
        far.receive()
    assert not far.poll()
    near.close()
    for beside in (False, True, False):
        with pytest.raises(EOFError):
            far.receive(beside)
    assert far.poll()


def test_a_hang_up_wakes_who_waits_for_either():
    one, _ = (Duplex(end) for end in multiprocessing.Pipe())
    heard = []

    def wait(beside):
        try:
            one.receive(beside)
        except (EOFError, OSError):
            heard.append(beside)

    waiting = [threading.Thread(target=wait, args=(beside,), daemon=True) for beside in (False, True)]
    for thread in waiting:
        thread.start()
    one.hang_up()
    one.hang_up()  # again it changes nothing
    for thread in waiting:
        thread.join(60)
    assert sorted(heard) == [False, True]


def test_a_descriptor_stays_while_somebody_may_read_from_it():
    """Else another connection gets its number, and the thread takes what is that one's."""
    reads, goes_on = threading.Event(), threading.Event()
    one, other = multiprocessing.Pipe()
    receive = one.recv_bytes

    class Slow:
        """A connection whose reader is held up between two of its steps."""

        closed = property(lambda self: one.closed)
        fileno, send_bytes, close = one.fileno, one.send_bytes, one.close

        def recv_bytes(self):
            reads.set()
            assert goes_on.wait(60)
            return receive()

    duplex = Duplex(Slow())
    assert reads.wait(60)
    duplex.hang_up()
    assert not one.closed
    with pytest.raises(EOFError):
        other.recv_bytes()  # the other side hears of it at once
    goes_on.set()
    with pytest.raises(EOFError):
        duplex.receive()
    duplex.thread.join(60)
    assert one.closed
