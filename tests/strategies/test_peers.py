import queue
import socket
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from lit_qrl.callbacks import TruncatedIS
from lit_qrl.errors import ConfigError, StoppedError
from lit_qrl.strategies import peers
from lit_qrl.strategies.peers import Meeting, Peers, PeerWatch, check_same, settings
from tests.tiny_run import build
from tests.two_processes import free_ports


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def at_once(*calls):
    """Make calls of several processes, which stand for each other in this one, at the same time."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_processes_that_go_on_from_different_checkpoints_are_named(monkeypatch):
    trainer = SimpleNamespace(global_step=8)
    Peers().on_train_start(trainer, None)
    monkeypatch.setattr(peers, "gather_objects", lambda own: [own, 0])
    with pytest.raises(ConfigError, match=r"go on from different checkpoints.*step 8 on rank 0, step 0 on rank 1"):
        Peers().on_train_start(trainer, None)


def met(size, given):
    """What each of the processes, all in this one, was given in two rounds."""
    port, found = free_ports(1)[0], {}

    def come(rank):
        here = Meeting("127.0.0.1", port, rank, size)
        found[rank] = [here.exchange(given(rank)), here.exchange(rank)]

    at_once(*(partial(come, rank) for rank in reversed(range(size))))
    return found


def test_every_process_has_what_each_gives_by_rank():
    found = met(3, lambda rank: {"data.group_size": rank, "more": [None, 1.5]})
    wanted = [{"data.group_size": rank, "more": [None, 1.5]} for rank in range(3)]
    assert found == {rank: [wanted, [0, 1, 2]] for rank in range(3)}


def test_processes_that_do_not_come_are_named(monkeypatch):
    here = Meeting("127.0.0.1", free_ports(1)[0], 0, 3)
    monkeypatch.setattr(peers, "COME", 0.2)
    with pytest.raises(ConfigError, match=r"Processes of the run are missing.*none of rank 1, 2\. See what"):
        here.exchange("mine")


def test_a_first_process_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(peers, "COME", 1.0)
    port = free_ports(1)[0]
    with pytest.raises(ConfigError, match=rf"cannot meet.*the first of them at 127.0.0.1:{port}.*MASTER_ADDR"):
        Meeting("127.0.0.1", port, 1, 2)


def test_a_port_that_somebody_listens_on_is_named():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"a port that it can listen on, {port}.*in use"):
            Meeting("127.0.0.1", port, 0, 2)


def test_a_first_process_that_has_ended_is_told():
    port = free_ports(1)[0]
    first = Meeting("127.0.0.1", port, 0, 2)
    second = Meeting("127.0.0.1", port, 1, 2)
    del first
    with pytest.raises(ConfigError, match="The first process of the run ended before the others had met it"):
        second.exchange("mine")


def test_under_torchrun_no_process_holds_the_store(monkeypatch):
    agent = Meeting("127.0.0.1", free_ports(1)[0], 0, 1)  # stands for torchrun's own
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    found = {}
    port = int(agent._place.rpartition(":")[2])
    at_once(*(lambda r=r: found.update({r: Meeting("127.0.0.1", port, r, 2).exchange(r)}) for r in range(2)))
    assert found == {0: [0, 1], 1: [0, 1]}


def test_settings_that_differ_are_named_with_their_ranks():
    check_same([{"data.seed": 1}] * 3)
    with pytest.raises(ConfigError, match=r"data\.seed 1 on rank 0 and 2 on rank 2, model\.warmup None on rank 0 and"):
        check_same([{"data.seed": 1}, {"data.seed": 1}, {"data.seed": 2, "model.warmup": 0.1}])


def test_of_a_class_that_differs_the_class_alone_is_named():
    one = {"trainer.callbacks.AIS": "AIS", "trainer.callbacks.AIS.clip": 5.0, "data.top_p": 1.0}
    with pytest.raises(ConfigError) as caught:
        check_same([one, {"data.top_p": 1.0}])
    assert caught.value.given == "trainer.callbacks.AIS AIS on rank 0 and None on rank 1"


def test_settings_are_those_that_decide_what_is_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    trainer, module, data = build(tmp_path, callbacks=[TruncatedIS(upper=3.0)], trainer={"max_epochs": 4})
    trainer.strategy.connect(module)
    trainer.datamodule = data
    found = settings(trainer)
    names = ("seed_everything", "trainer.max_epochs", "trainer.callbacks.TruncatedIS.upper", "trainer.strategy")
    assert [found[name] for name in names] == ["7", 4, 3.0, "SingleDeviceStrategy"]
    assert found["data.prompts_per_iteration"] == data.prompts_per_iteration
    assert not [name for name in found if "default_root_dir" in name]


def connected(size):
    """The watches of a run's processes, all in this one, and what each was told."""
    told = [queue.Queue() for _ in range(size)]
    watches = [PeerWatch(lambda *gone, own=own: own.put(gone), own.put) for own in told]
    address = queue.Queue()

    def exchange(value):
        if value is None:
            return [address.get(timeout=20)]
        for _ in range(size - 1):
            address.put(value)
        return [value]

    at_once(*(partial(watch.start, rank, size, exchange) for rank, watch in enumerate(watches)))
    return watches, told


def killed(watch):
    """Let the system close what the process held, as it does when it is killed."""
    watch._ended.set()
    for connection in watch._peers.values():
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_first_process_is_told_which_one_is_gone_and_the_others_where_it_is_the_first(lost):
    watches, told = connected(3)
    killed(watches[lost])
    for rank in [1, 2] if lost == 0 else [0]:
        assert told[rank].get(timeout=20) == (lost, None)
    assert told[lost].empty()
    for watch in watches:
        watch.stop()


@pytest.mark.parametrize("signalled", [0, 1, 2])
def test_all_others_are_told_of_a_signal_and_go_on_watching(signalled):
    watches, told = connected(3)
    for number in (15, 2):
        watches[signalled].tell(peers.SIGNALLED + number)
        assert [own.get(timeout=20) for rank, own in enumerate(told) if rank != signalled] == [number] * 2
    killed(watches[signalled])
    assert told[1 if signalled == 0 else 0].get(timeout=20) == (signalled, None)
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
    watches, told = connected(2)
    watches[1].stop(70)
    assert told[0].get(timeout=20) == (1, 70)
    monkeypatch.setattr(peers, "GRACE", 2.0)
    watches, told = connected(2)
    for watch in watches:
        watch.stop(2)
    assert [own.qsize() for own in told] == [0, 0]


def test_a_process_that_has_no_error_of_its_own_hears_at_once_whose_it_is(monkeypatch):
    watches, told = connected(2)
    failing = threading.Thread(target=watches[1].stop, args=(2,))
    failing.start()
    watches[0].wait(5)  # which is shorter than the grace
    assert told[0].get(timeout=5) == (1, 2)
    watches[0].stop()
    failing.join(20)  # the first one may tell it, before what started both ends it
    assert not failing.is_alive()


def watching(rank, monkeypatch, tmp_path):
    found, ended = Peers(), []
    found._trainer = SimpleNamespace(
        global_rank=rank, world_size=3, default_root_dir=str(tmp_path), is_global_zero=rank == 0, current_epoch=4
    )
    monkeypatch.setattr(peers.os, "_exit", ended.append)
    monkeypatch.setattr(peers, "event", lambda *given, **more: None)
    return found, ended


@pytest.mark.parametrize(
    ("rank", "lost", "status", "speaks", "ends"),
    [
        *((0, 2, None, True, 75), (1, 0, None, True, 75), (2, 0, None, False, 75), (1, 0, 75, False, 75)),
        *((0, 1, 1, True, 75), (0, 1, 70, True, 70), (1, 0, 2, False, 2)),
    ],
)
def test_one_of_those_that_are_left_says_what_happened(rank, lost, status, speaks, ends, monkeypatch, tmp_path, capsys):
    found, ended = watching(rank, monkeypatch, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    found._gone(lost, status)
    said = " ".join(capsys.readouterr().err.split())
    assert ended == [ends]
    how = "by an error, which it tells," if status else "without a word"
    assert (f"Rank {lost} of 3 ended {how}" in said) == speaks
    assert ("last.ckpt. Start the run again with --resume_if_possible true" in said) == (speaks and ends == 75)


def test_a_broken_collective_waits_for_its_cause_and_another_error_is_told(monkeypatch):
    found, said = Peers(), []
    found._watch = SimpleNamespace(wait=lambda s: said.append("wait"), stop=said.append)
    for error in (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), ValueError("a bug")):
        found.on_exception(None, None, error)
    found.on_exception(None, None, StoppedError("the disk is full"))
    assert said == ["wait", 1, 1, 70]
