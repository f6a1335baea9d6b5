import socket
import threading

import pytest

from lit_qrl.errors import ConfigError
from lit_qrl.run import meeting
from lit_qrl.run.meeting import Meeting, gather_objects, several_processes
from tests.two_processes import free_ports


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def met(size, given):
    """What each of the processes, all in this one, was given in two rounds."""
    port, found = free_ports(1)[0], {}

    def come(rank):
        here = Meeting("127.0.0.1", port, rank, size)
        found[rank] = [here.exchange(given(rank)), here.exchange(rank)]

    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_every_process_has_what_each_gives_by_rank():
    found = met(3, lambda rank: {"data.group_size": rank, "more": [None, 1.5]})
    wanted = [{"data.group_size": rank, "more": [None, 1.5]} for rank in range(3)]
    assert found == {rank: [wanted, [0, 1, 2]] for rank in range(3)}


def test_processes_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(meeting, "COME", 0.2)
    here = Meeting("127.0.0.1", free_ports(1)[0], 0, 3)
    with pytest.raises(ConfigError, match=r"Processes of the run are missing.*none of rank 1, 2\. See what"):
        here.exchange("mine")


def test_whom_it_waits_for_is_said_meanwhile(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "COME", 0.3)
    monkeypatch.setattr(meeting, "TOLD", 0.1)
    with pytest.raises(ConfigError):
        Meeting("127.0.0.1", free_ports(1)[0], 0, 2).exchange("mine")
    assert [record.getMessage()[-7:] for record in caplog.records] == ["rank 1."]


@pytest.mark.parametrize(
    ("error", "patience"),
    [(OSError(113, "No route to host"), "REACHED"), (ConnectionRefusedError(111, "Connection refused"), "COME")],
)
def test_a_first_process_that_cannot_be_reached_is_named(error, patience, monkeypatch):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(meeting.socket, "create_connection", refuse)
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(meeting, patience, 0.0)
    with pytest.raises(ConfigError, match=rf"cannot be reached.*node7:29500 \(MASTER_ADDR.*{error.strerror} after"):
        Meeting("node7", 29500, 1, 2)


def test_another_program_at_the_port_is_no_first_process(monkeypatch):
    monkeypatch.setattr(meeting, "REACHED", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"the first of them at 127.0.0.1:{port}.*no process of a run"):
            Meeting("127.0.0.1", port, 1, 2)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}, which it cannot open"):
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
    threads = [
        threading.Thread(target=lambda r=r: found.update({r: Meeting("127.0.0.1", port, r, 2).exchange(r)}))
        for r in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: [0, 1], 1: [0, 1]}


def test_a_process_by_itself_gathers_its_own():
    assert not several_processes()
    assert gather_objects({"a": 1}) == [{"a": 1}]
