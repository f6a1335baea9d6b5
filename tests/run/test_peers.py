import queue
import socket
import threading

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.run import peers
from lit_qrl.run.peers import PeerWatch, check_same, require_free_port


def connected(size):
    """The watches of a run's processes, all in this one, and what each was told."""
    told = [queue.Queue() for _ in range(size)]
    watches = [PeerWatch(lambda *gone, own=own: own.put(gone), own.put) for own in told]
    address = queue.Queue()

    def broadcast(value):
        if value is None:
            return address.get(timeout=20)
        for _ in range(size - 1):
            address.put(value)
        return value

    threads = [threading.Thread(target=watch.start, args=(rank, size, broadcast)) for rank, watch in enumerate(watches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return watches, told


def killed(watch):
    """Let the system close what the process held, as it does when it is killed."""
    watch._own_end.set()
    watch._close()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_all_others_are_told_which_process_is_gone(lost):
    watches, told = connected(3)
    killed(watches[lost])
    for rank, own in enumerate(told):
        if rank != lost:
            assert own.get(timeout=20) == (lost, "", 0)
    assert told[lost].empty()
    for watch in watches:
        watch.stop()


@pytest.mark.parametrize("signalled", [0, 1, 2])
def test_all_others_are_told_of_a_signal_and_go_on_watching(signalled):
    watches, told = connected(3)
    for number in (15, 2):
        watches[signalled].tell_signal(number)
        assert [own.get(timeout=20) for rank, own in enumerate(told) if rank != signalled] == [number] * 2
    killed(watches[signalled])
    assert [own.get(timeout=20) for rank, own in enumerate(told) if rank != signalled] == [(signalled, "", 0)] * 2
    assert told[signalled].empty()
    for watch in watches:
        watch.stop()


def test_processes_that_are_done_part_without_a_word():
    watches, told = connected(3)
    for watch in watches:
        watch.stop()
    assert [own.qsize() for own in told] == [0, 0, 0]
    assert not [thread for thread in threading.enumerate() if thread.name == "peers"]


def test_an_error_of_one_is_told_and_the_same_error_of_all_is_not(monkeypatch):
    monkeypatch.setattr(peers, "GRACE", 0.05)
    watches, told = connected(3)
    watches[2].fail("RewardError: it is away", 70)
    watches[2].stop()
    assert {own.get(timeout=20) for own in told[:2]} == {(2, "RewardError: it is away", 70)}
    monkeypatch.setattr(peers, "GRACE", 20.0)
    watches, told = connected(2)
    for watch in watches:
        watch.fail("ConfigError: the same")
        watch.stop()
    assert [own.qsize() for own in told] == [0, 0]


def test_a_process_that_has_no_error_of_its_own_hears_at_once_whose_it_is():
    watches, told = connected(2)
    watches[1].fail("It does not fit.", 2)
    watches[1].stop()
    watches[0].wait(5)  # which is shorter than the grace
    assert told[0].get_nowait() == (1, "It does not fit.", 2)
    watches[0].stop()


def test_settings_that_differ_are_named_with_their_ranks():
    check_same([{"data.seed": 1}] * 3)
    with pytest.raises(ConfigError, match=r"data\.seed 1 on rank 0 and 2 on rank 2, model\.warmup None on rank 0 and"):
        check_same([{"data.seed": 1}, {"data.seed": 1}, {"data.seed": 2, "model.warmup": 0.1}])


def test_a_port_that_somebody_listens_on_is_named():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        listening.listen()
        with pytest.raises(ConfigError, match=rf"their port is in use.*MASTER_PORT {port} \(.*leave it out"):
            require_free_port(port)
    require_free_port(port)


def test_of_a_class_that_differs_the_class_alone_is_named():
    one = {"trainer.callbacks.AIS": "AIS", "trainer.callbacks.AIS.clip": 5.0, "data.top_p": 1.0}
    with pytest.raises(ConfigError) as caught:
        check_same([one, {"data.top_p": 1.0}])
    assert caught.value.given == "trainer.callbacks.AIS AIS on rank 0 and None on rank 1"


def test_a_process_that_fails_ends_after_the_first_one_has(monkeypatch):
    watches, _ = connected(2)
    thread = threading.Thread(target=watches[1].fail, args=("ConfigError: a file is missing",))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()  # the first one may tell it, before what started both ends it
    watches[0].stop()
    thread.join(20)
    assert not thread.is_alive()
    watches[1].stop()


@pytest.mark.parametrize(("met", "orphan", "quiet"), [(False, False, False), (False, True, True), (True, False, True)])
def test_who_says_why_it_ends(met, orphan, quiet, monkeypatch):
    parents = iter([1, 2] if orphan else [1] * 1000)
    monkeypatch.setattr(peers, "MET", threading.Event())
    monkeypatch.setattr(peers, "MOMENT", 0.3)
    monkeypatch.setattr(peers.os, "getppid", lambda: next(parents))
    if met:
        peers.MET.set()
    assert not peers.silent(0)
    assert peers.silent(1) == quiet
