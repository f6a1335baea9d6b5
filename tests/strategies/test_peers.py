import os
import signal
import threading
from types import SimpleNamespace

import pytest

from lit_qrl.callbacks import TruncatedIS
from lit_qrl.run.interrupt import Interrupted
from lit_qrl.strategies import peers
from lit_qrl.strategies.peers import Peers, relieve_lightning, settings
from tests.tiny_run import build


def watching(rank, monkeypatch, tmp_path):
    found, ended = Peers(), []
    found._trainer = SimpleNamespace(
        global_rank=rank, world_size=3, default_root_dir=str(tmp_path), is_global_zero=rank == 0, current_epoch=4
    )
    monkeypatch.setattr(peers.os, "_exit", ended.append)
    return found, ended


@pytest.mark.parametrize(("rank", "lost", "speaks"), [(0, 2, True), (1, 2, False), (1, 0, True), (2, 0, False)])
def test_one_of_those_that_are_left_says_what_happened(rank, lost, speaks, monkeypatch, tmp_path, capsys):
    found, ended = watching(rank, monkeypatch, tmp_path)
    monkeypatch.setattr(peers, "event", lambda *given, **more: None)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    found._gone(lost, "")
    said = " ".join(capsys.readouterr().err.split())
    assert ended == [75]
    assert (f"Rank {lost} of 3 ended without a word" in said) == speaks
    assert ("last.ckpt. Start the run again with --resume_if_possible true" in said) == speaks


def test_the_last_words_of_a_process_are_passed_on(monkeypatch, tmp_path, capsys):
    found, _ = watching(0, monkeypatch, tmp_path)
    monkeypatch.setattr(peers, "event", lambda *given, **more: None)
    found._gone(1, "StoppedError: the disk is full")
    assert "Rank 1 of 3 ended by an error: StoppedError: the disk is full" in " ".join(capsys.readouterr().err.split())


def test_what_one_host_alone_cannot_do_is_told_as_a_configuration(monkeypatch, tmp_path, capsys):
    found, ended = watching(0, monkeypatch, tmp_path)
    found._gone(1, "data.task.path: the file problems.jsonl does not exist. Check the path.", 2)
    said = " ".join(capsys.readouterr().err.split())
    assert said == "lit-qrl: Rank 1 of 3: data.task.path: the file problems.jsonl does not exist. Check the path."
    assert ended == [2]


def test_a_broken_collective_waits_for_its_cause_and_another_error_is_told(monkeypatch):
    found, said = Peers(), []
    fail = lambda words, status: said.append((words, status))  # noqa: E731
    found._watch = SimpleNamespace(wait=lambda s: said.append("wait"), fail=fail, stop=lambda: said.append("."))
    found.on_exception(None, None, RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert said[0] == "wait"
    said.clear()
    found.on_exception(None, None, ValueError("a bug"))
    assert said == [("ValueError: a bug", 0), "."]


def test_lightnings_own_thread_is_sent_home():
    asked = threading.Event()

    class Observer(threading.Thread):
        def _run(self):
            return False

        def run(self):
            asked.wait(20)

    thread = Observer(name="child-process-observer", daemon=True)
    thread.start()
    relieve_lightning()
    assert thread._run() is True
    asked.set()
    thread.join()


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


def test_a_signal_while_the_others_are_waited_for_ends_those_that_were_started_too(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(peers, "settings", lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(peers, "Meeting", lambda *place: SimpleNamespace(exchange=lambda own: [own]))
    place = SimpleNamespace(main_address="127.0.0.1", main_port=0)
    trainer = SimpleNamespace(
        global_rank=0,
        world_size=2,
        strategy=SimpleNamespace(cluster_environment=place),
        _signal_connector=SimpleNamespace(),
    )
    with pytest.raises(Interrupted):  # at which Lightning kills them
        Peers().meet(trainer)
    assert signal.getsignal(signal.SIGTERM) is before
