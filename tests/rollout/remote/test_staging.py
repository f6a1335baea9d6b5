"""Weights that come while an engine draws are the same ones, are taken whole or not at all, and cost it no draw."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.loop.schedule import RolloutPrefetcher
from lit_qrl.publish.delivery import Stages
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError, SamplerSpec
from lit_qrl.rollout.remote import publishing
from lit_qrl.rollout.remote.engine import RemoteEngine
from lit_qrl.rollout.remote.server import Session
from lit_qrl.rollout.remote.staging import HalfSentError, Staging
from lit_qrl.run.event_log import read_jsonl
from tests.loop.test_ahead import ONE_OFF, rows
from tests.loop.test_ahead import fit as fit_ahead
from tests.networks import build_network
from tests.rollout.remote.served import PROMPTS, SAMPLING, TOKEN, embedded, publish, remote, server

PATIENCE = 60.0
NORM = "model.norm.weight"


class Held(TransformersEngine):
    """Draws when it is let, once the switch is on."""

    switch = False
    begun, goes_on = threading.Semaphore(0), threading.Semaphore(0)

    def generate(self, *args, **kwargs):
        if Held.switch:
            Held.begun.release()
            assert Held.goes_on.acquire(timeout=PATIENCE)
        return super().generate(*args, **kwargs)


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(Held, "switch", True)
    monkeypatch.setattr(Held, "begun", threading.Semaphore(0))
    monkeypatch.setattr(Held, "goes_on", threading.Semaphore(0))
    monkeypatch.setattr(publishing, "chunks", partial(publishing.chunks, limit=4000))


class Drawing(threading.Thread):
    """A draw under way in another thread, of every replica of an engine."""

    def __init__(self, engine):
        super().__init__(daemon=True)
        self.engine, self.drawn, self.error = engine, None, None
        self.start()
        for _ in engine.replicas:
            assert Held.begun.acquire(timeout=PATIENCE)

    def run(self):
        try:
            self.drawn = self.engine.generate(PROMPTS, 2, 7)
        except EngineDiedError as error:
            self.error = error

    def end(self):
        for _ in self.engine.replicas:
            Held.goes_on.release()
        self.join(PATIENCE)
        assert not self.is_alive()


@pytest.fixture
def taken(monkeypatch):
    """The chunks that servers have staged."""
    found, take = [], Staging.take

    def noted(staging, number, unpack):
        take(staging, number, unpack)
        found.append(number)

    monkeypatch.setattr(Staging, "take", noted)
    return found


def other_network():
    torch.manual_seed(5)
    network = build_network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network


def plain(completions):
    return [(one.token_ids, one.logprobs, one.version) for one in completions]


def drawn_by(network, format, version):
    return [(ids, logprobs, version) for ids, logprobs, _ in plain(embedded(network, format).generate(PROMPTS, 2, 7))]


@pytest.mark.parametrize("format", [None, "fp8_row", "int4_group", "nvfp4"])
@pytest.mark.parametrize(
    ("transfer", "servers"), [("memory", 1), ("socket", 1), ("collective", 1), ("memory", 2), ("collective", 2)]
)
def test_all_weights_are_there_before_the_draw_ends_and_are_taken_after_it(
    tmp_path, held, taken, format, transfer, servers
):
    new, events = other_network(), []
    with remote(tmp_path, servers=servers, engine=Held(), transfer=transfer) as (engine, old):
        assert isinstance(engine, Stages)
        assert publish(engine, old, format)[0] == []
        drawing = Drawing(engine)

        def until():
            events.append((len(taken), drawing.is_alive(), engine.version))
            drawing.end()

        with engine.staged(until):
            faults, report = publish(engine, new, format, 1)
        Held.switch = False
        assert (faults, report.version) == ([], 1)
        assert events == [(len(taken), True, 0)]
        assert len(taken) > 3 * servers
        assert {"send", "take", "engine_load"} <= report.parts.keys()
        if servers == 1:
            assert plain(drawing.drawn) == drawn_by(old, format, 0)
            assert plain(engine.generate(PROMPTS, 2, 7)) == drawn_by(new, format, 1)
        else:
            assert {one.version for one in drawing.drawn} == {0}
            assert {one.version for one in engine.generate(PROMPTS, 2, 7)} == {1}


def test_a_stream_after_the_first_finds_an_engine_that_stands_still(tmp_path, held, taken):
    with remote(tmp_path, engine=Held()) as (engine, network):
        publish(engine, network)
        drawing, called = Drawing(engine), []
        with engine.staged(lambda: called.append(drawing.end())):
            assert publish(engine, network, version=1)[0] == []
            staged = len(taken)
            assert publish(engine, network, version=2)[0] == []
        assert (len(called), len(taken)) == (1, staged)


def test_a_group_that_has_to_be_made_anew_waits_for_the_end_of_the_draw(tmp_path, held, taken):
    with remote(tmp_path, engine=Held(), transfer="collective") as (engine, network):
        publish(engine, network)
        drawing = Drawing(engine)
        engine._sender._leave()
        with engine.staged(drawing.end):
            assert publish(engine, network, version=1)[0] == []
        assert taken == []


def test_what_was_corrupted_while_it_waited_is_named(tmp_path, held, monkeypatch):
    take = Staging.stream

    def corrupted(staging, number, count):
        for name, tensor in take(staging, number, count):
            yield name, tensor + 1 if name == NORM else tensor

    with remote(tmp_path, engine=Held()) as (engine, network):
        publish(engine, network)
        drawing = Drawing(engine)
        monkeypatch.setattr(Staging, "stream", corrupted)
        with engine.staged(drawing.end):
            faults, _ = publish(engine, network, version=1)
        assert ("different", NORM) in {(fault.kind, fault.name) for fault in faults}


def test_weights_that_are_half_sent_are_refused_and_the_old_ones_stay(tmp_path, held):
    new = other_network()

    def half(stream):
        for number, one in enumerate(stream):
            if number == 7:
                raise PublishError([], 1)
            yield one

    with remote(tmp_path, engine=Held()) as (engine, old):
        publish(engine, old)
        drawing = Drawing(engine)
        with pytest.raises(PublishError), engine.staged(drawing.end):
            publish(engine, new, version=1, wire=half)
        replica = engine.replicas[0]
        drawing.end()
        assert plain(drawing.drawn) == drawn_by(old, None, 0)
        replica.begin_taking(9, "load_weights", None, 1)
        with pytest.raises(HalfSentError, match=r"Of a publish of 9 parts \d are here"):
            replica.answer()
        replica._staging += 1
        replica.begin_taking(0, "load_weights", None, 1)  # of a publish that was never begun
        with pytest.raises(HalfSentError):
            replica.answer()
        Held.switch = False
        assert plain(engine.generate(PROMPTS, 2, 7)) == drawn_by(old, None, 0)
        assert publish(engine, new, version=2)[0] == []
        assert plain(engine.generate(PROMPTS, 2, 7)) == drawn_by(new, None, 2)


def test_a_part_of_another_publish_is_refused(tmp_path):
    with remote(tmp_path) as (engine, network):
        publish(engine, network)
        replica = engine.replicas[0]
        replica.begin_staging()
        replica.stage_chunk(("socket", [], 0), [])
        replica.await_staged()
        replica._send("stage", 99, ("socket", [], 0), following=[])
        replica._staging = 99  # under which it is answered
        with pytest.raises(HalfSentError, match="was not begun"):
            replica.await_staged()


def test_what_a_server_cannot_take_is_raised_by_the_sender_and_the_draw_goes_on(tmp_path, held, monkeypatch):
    def refuses(staging, number, unpack):
        raise OSError("no memory of that name")

    with remote(tmp_path, engine=Held()) as (engine, network):
        publish(engine, network)
        drawing = Drawing(engine)
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "take", refuses)
            with pytest.raises(OSError, match="no memory of that name"), engine.staged(drawing.end):
                publish(engine, network, version=1)
        drawing.end()
        assert {one.version for one in drawing.drawn} == {0}
        assert publish(engine, network, version=1)[0] == []


@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_is_gone_on_the_way_is_an_engine_that_died(tmp_path, held, servers):
    with remote(tmp_path, servers=servers, engine=Held()) as (engine, network):
        publish(engine, network)
        drawing = Drawing(engine)

        def cut(stream):
            for number, one in enumerate(stream):
                if number == 7:
                    engine.replicas[-1].connection.hang_up()
                yield one

        with pytest.raises(EngineDiedError), engine.staged(drawing.end):
            publish(engine, network, version=1, wire=cut)
        drawing.end()
        assert drawing.error is not None
        Held.switch = False
        engine.discard()
        engine.setup(SamplerSpec(sampling=SAMPLING), SimpleNamespace(network=network))
        assert publish(engine, network, version=2)[0] == []
        assert {one.version for one in engine.generate(PROMPTS, 2, 7)} == {2}


# ----------------------------------------------------------------------------------------------------------- whole runs


class Waits(TransformersEngine):
    """Draws every rollout but the first when weights are on their way to it."""

    staged = True
    calls, dies_at, staging = 0, 0, threading.Semaphore(0)

    def generate(self, *args, **kwargs):
        Waits.calls += 1
        if Waits.staged and Waits.calls > 1:
            assert Waits.staging.acquire(timeout=PATIENCE)
        if Waits.calls == Waits.dies_at:
            Waits.staged = False
            raise EngineDiedError("vLLM failed while generating: OutOfMemoryError: CUDA out of memory.")
        return super().generate(*args, **kwargs)


def fit(folder, monkeypatch, staged=True, data=ONE_OFF, **options):
    """A run over a server in a thread, whose weights come while it draws, or when it stands still."""
    beside = Session._beside

    def told(session, message):
        if message[0] == "staging":
            Waits.staging.release()
        beside(session, message)

    folder.mkdir()
    (folder / "token").write_text(TOKEN.decode())
    with monkeypatch.context() as patch, server() as place:
        patch.setattr(Session, "_beside", told)
        for name, value in {"staged": staged, "calls": 0, "staging": threading.Semaphore(0)}.items():
            patch.setattr(Waits, name, value)
        if not staged:
            patch.setattr(RolloutPrefetcher, "drawing", False)
        engine = RemoteEngine(Waits(), hosts=[place], token_file=str(folder / "token"))
        return fit_ahead(folder, data, epochs=5, engine=engine, format="fp8_row", **options)


def test_a_run_whose_weights_come_while_it_draws_is_the_same_run(tmp_path, monkeypatch):
    plain_run = fit(tmp_path / "after", monkeypatch, staged=False)
    run = fit(tmp_path / "meanwhile", monkeypatch)
    assert torch.equal(run.weights, plain_run.weights)
    assert run.watch.versions == plain_run.watch.versions == [[0], [0], [1], [2], [3]]
    for name in ("mismatch/kl_k3", "mismatch/staleness_kl", "publish/version"):
        assert [row.get(name) for row in rows(run)] == [row.get(name) for row in rows(plain_run)]
    assert all("time/publish_take" in row for row in rows(run))
    assert [row["time/publish_take"] != "" for row in rows(run)] == [False, True, True, True, True]


def test_a_wait_for_the_draw_is_no_part_of_the_publish(tmp_path, monkeypatch):
    import time

    take = RolloutPrefetcher.settle

    def late(ahead, learner):
        time.sleep(0.3)
        return take(ahead, learner)

    monkeypatch.setattr(RolloutPrefetcher, "settle", late)
    run = fit(tmp_path / "run", monkeypatch)
    later = rows(run)[1:]
    assert all(float(row["time/wait"]) > 0.3 for row in later)
    assert all(0 < float(row["time/publish"]) < float(row["time/iteration"]) - 0.3 for row in later)


@pytest.mark.parametrize("at", [1, 3])
def test_a_death_while_weights_are_on_their_way_is_outlived(tmp_path, monkeypatch, at):
    whole = fit(tmp_path / "whole", monkeypatch, staged=False)
    stage, died = publishing.Sender._hand_over, []

    def cut(sender, chunk):
        (replica,) = sender.ways
        if sender._stages and replica._staging == at and not died:
            died.append(at)
            Waits.staged = False
            replica.connection.hang_up()
        stage(sender, chunk)

    monkeypatch.setattr(publishing.Sender, "_hand_over", cut)
    run = fit(tmp_path / "died", monkeypatch)
    assert died == [at]
    assert run.watch.prompts == whole.watch.prompts
    deaths = [one for one in read_jsonl(run.folder / "events.jsonl") if one["kind"] == "engine_died"]
    assert len(deaths) == 1
    assert max(run.data.schedule.tokens_of_age) <= 1


def test_an_engine_that_dies_of_its_draw_is_built_again_also_where_it_says_that_memory_ran_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Waits, "dies_at", 3)
    run = fit(tmp_path / "died", monkeypatch)
    (death,) = [one for one in read_jsonl(run.folder / "events.jsonl") if one["kind"] == "engine_died"]
    assert "CUDA out of memory" in death["message"]


def test_weights_that_were_garbled_while_they_waited_end_the_run_before_anything_is_drawn(tmp_path, monkeypatch):
    stream = Staging.stream

    def corrupted(staging, number, count):
        for name, tensor in stream(staging, number, count):
            yield name, tensor + 1 if name == NORM else tensor

    monkeypatch.setattr(Staging, "stream", corrupted)
    with pytest.raises(PublishError, match=rf"different: {NORM}"):
        fit(tmp_path / "run", monkeypatch)
    assert Waits.calls == 0  # of the class, again
