"""A thread draws over a connection and another interrupts it: weights come in flight in every order of events."""

import threading
from contextlib import contextmanager, nullcontext

import pytest

from lit_qrl.callbacks import RunCheckpoint
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.rollout.pauses import Pauses, Stand
from lit_qrl.rollout.remote.engine import RemoteEngine
from lit_qrl.rollout.remote.pausing import AstrayError, Pausing
from lit_qrl.rollout.remote.replica import Replica
from lit_qrl.rollout.remote.server import Session
from lit_qrl.run.event_log import read_jsonl
from tests.rollout.embedded.test_flight import SAMPLING, after, set_up, two_networks
from tests.rollout.remote.served import PROMPTS, TOKEN, publish, remote, server
from tests.tiny_run import build, without_plots

STEPS = 4
"""Of a draw, after which the server waits until it is asked to pause."""
PATIENCE = 60.0


@pytest.fixture
def stops(monkeypatch):
    """Let servers wait for a pause, once each, in their first draw; gives a semaphore of those that wait."""
    reached, seen = threading.Semaphore(0), {}
    reached.on = True
    between = Session._between_steps

    def counted(session):
        seen[session] = seen.get(session, 0) + 1
        if reached.on and seen[session] == STEPS:
            reached.release()
            session.connection.poll(PATIENCE)
        between(session)

    monkeypatch.setattr(Session, "_between_steps", counted)
    return reached


class Drawing(threading.Thread):
    """Draws in a thread of its own."""

    def __init__(self, engine, seed=7):
        super().__init__(daemon=True)
        self.engine, self.seed, self.drawn, self.error = engine, seed, None, None
        self.start()

    def run(self):
        try:
            self.drawn = self.engine.generate(PROMPTS, 2, self.seed)
        except (EngineDiedError, AstrayError) as error:
            self.error = error

    def result(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.drawn


def flying(tmp_path, network, mode="keep", **options):
    """A remote engine whose completions take weights in flight."""
    return remote(tmp_path, in_flight=mode, sampling=SAMPLING, network=network, **options)


@contextmanager
def standing_still(tmp_path, stops, network):
    """Give a remote engine that stands still in the middle of a draw, and the draw."""
    with flying(tmp_path, network) as (engine, _):
        publish(engine, network)
        drawing = Drawing(engine)
        assert stops.acquire(timeout=PATIENCE)
        engine.pause()
        yield engine, drawing


@pytest.mark.parametrize("staged", [False, True], ids=["still", "staged"])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_weights_that_come_over_the_wire_are_those_that_come_in_this_process(tmp_path, stops, mode, staged):
    old, new = two_networks()
    near = set_up(old, mode)
    near.between_steps = after(STEPS, lambda: publish(near, new, version=1))
    expected = near.generate(PROMPTS, 2, 7)
    with flying(tmp_path, old, mode) as (engine, _):
        assert isinstance(engine, Pauses)
        assert publish(engine, old)[0] == []
        drawing = Drawing(engine)
        assert stops.acquire(timeout=PATIENCE)
        if not staged:
            engine.pause()
        with engine.staged(engine.pause) if staged else nullcontext():
            faults, report = publish(engine, new, version=1)  # verified before a token is drawn with it
        engine.resume()
        assert (faults, report.version) == ([], 1)
        assert drawing.result() == expected
        assert all(one.versions[:STEPS] == [0] * STEPS for one in expected)


def test_all_replicas_stand_still_and_go_on(tmp_path, stops):
    old, new = two_networks()
    with flying(tmp_path, old, servers=2) as (engine, _):
        publish(engine, old)
        drawing = Drawing(engine)
        for _ in engine.replicas:
            assert stops.acquire(timeout=PATIENCE)
        engine.pause()
        assert publish(engine, new, version=1)[0] == []
        assert len(engine.score(PROMPTS)) == len(PROMPTS)  # whatever is asked of an engine that stands still
        engine.resume()
        assert {version for one in drawing.result() for version in one.versions} == {0, 1}


def test_a_pause_that_comes_after_the_last_step_is_one_too(tmp_path, monkeypatch):
    old, new = two_networks()
    drawn, send = threading.Event(), Session._send

    def late(session, kind, number, value):
        if kind == "answer" and isinstance(value, list) and value and hasattr(value[0], "token_ids"):
            drawn.set()
            session.connection.poll(PATIENCE)  # the pause was asked for, and the answer goes out before it is read
        send(session, kind, number, value)

    with flying(tmp_path, old) as (engine, _):
        publish(engine, old)
        monkeypatch.setattr(Session, "_send", late)
        drawing = Drawing(engine)
        assert drawn.wait(PATIENCE)
        engine.pause()
        assert publish(engine, new, version=1)[0] == []
        engine.resume()
        assert {(one.version, one.versions is None) for one in drawing.result()} == {(0, True)}
        monkeypatch.setattr(Session, "_send", send)
        assert {one.version for one in engine.generate(PROMPTS, 1, 7)} == {1}


def test_a_draw_that_begins_in_a_pause_waits_for_its_end(tmp_path):
    old, new = two_networks()
    with flying(tmp_path, old) as (engine, _):
        publish(engine, old)
        engine.pause()
        drawing = Drawing(engine)
        assert publish(engine, new, version=1)[0] == []
        engine.resume()
        assert {(one.version, one.versions is None) for one in drawing.result()} == {(1, True)}


def test_what_was_under_way_ends_where_the_weights_did_not_come_whole(tmp_path, stops):
    old, new = two_networks()
    with standing_still(tmp_path, stops, old) as (engine, drawing):

        def half(stream):
            yield next(stream)
            raise RuntimeError("half sent")

        with pytest.raises(RuntimeError, match="half sent"):
            publish(engine, new, version=1, wire=half)
        engine.resume(whole=False)
        assert drawing.result() is None
        assert drawing.error is not None
        stops.on = False
        engine.setup(engine.spec, engine.engine.policy)
        assert publish(engine, new, version=2)[0] == []
        assert {one.version for one in engine.generate(PROMPTS, 1, 7)} == {2}


def test_an_engine_that_dies_in_a_pause_is_heard_of_on_both_sides(tmp_path, stops):
    old, new = two_networks()
    with standing_still(tmp_path, stops, old) as (engine, drawing):
        engine.replicas[0].connection.hang_up()
        with pytest.raises(EngineDiedError):
            publish(engine, new, version=1)
        engine.resume(whole=False)
        assert drawing.result() is None
        assert drawing.error is not None


def test_a_pause_that_is_interrupted_before_it_came_is_none(tmp_path, monkeypatch):
    network, _ = two_networks()
    between = Session._between_steps
    asked, interrupted, seen = threading.Event(), threading.Event(), []

    def slow(session):  # the step under way when it is asked to stop ends after the one who asked has gone
        seen.append(1)
        if len(seen) == STEPS:
            asked.set()
            session.connection.poll(PATIENCE)
            interrupted.wait(PATIENCE)
        between(session)

    monkeypatch.setattr(Session, "_between_steps", slow)
    near = set_up(network, "keep")
    with flying(tmp_path, network) as (engine, _):
        publish(engine, network)
        drawing = Drawing(engine)
        assert asked.wait(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(Replica, "await_pause", lambda replica: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.pause()
        interrupted.set()
        assert drawing.result() == near.generate(PROMPTS, 2, 7)
        assert len(engine.score(PROMPTS)) == len(PROMPTS)


def test_a_pause_right_after_another_waits_until_the_connection_is_handed_over_again():
    pausing, paused, handed = Pausing(), threading.Semaphore(0), []

    def draw():
        pausing.begin(lambda: None)
        for number in range(2):
            assert paused.acquire(timeout=PATIENCE)  # the server's word that it stands still
            handed.append(number)
            pausing.hand_over(lambda: None)
        pausing.end()

    drawing = threading.Thread(target=draw, daemon=True)
    drawing.start()
    while not pausing._drawing:
        pass
    pausing.want(paused.release)
    assert pausing.wait()
    with pausing._changed:  # so that the thread that draws cannot wake between the two
        pausing.release(lambda: None)
        pausing.want(paused.release)
    assert pausing.wait()
    assert handed == [0, 1]
    pausing.release(lambda: None)
    drawing.join(PATIENCE)
    assert not drawing.is_alive()


def test_an_engine_that_follows_a_course_stands_still_without_being_asked(tmp_path):
    old, new = two_networks()
    near = set_up(old, "keep")
    near.between_steps = after(STEPS + 1, lambda: publish(near, new, version=1))
    expected = near.generate(PROMPTS, 2, 7)
    with flying(tmp_path, old) as (engine, _):
        publish(engine, old)
        engine.follow([[Stand(7, STEPS), Stand(7, STEPS), Stand(7, None)]])
        drawing = Drawing(engine)
        assert engine.pause() == [Stand(7, STEPS)]
        engine.score(PROMPTS)
        engine.resume()
        assert engine.pause() == [Stand(7, STEPS)]  # a second time at the same step
        publish(engine, new, version=1)
        engine.resume()
        assert drawing.result() == expected
        next_one = Drawing(engine, seed=8)  # which the third pause comes before
        next_one.join(0.2)
        assert next_one.is_alive()
        assert engine.pause() == [Stand(7, None)]
        publish(engine, new, version=2)
        engine.resume()
        assert {one.version for one in next_one.result()} == {2}


def test_an_engine_that_does_not_come_to_where_it_was_to_stand_still_says_so_on_both_sides(tmp_path):
    network, _ = two_networks()
    with flying(tmp_path, network) as (engine, _):
        publish(engine, network)
        engine.follow([[Stand(7, 99)]])
        drawing = Drawing(engine)
        with pytest.raises(AstrayError, match="weights came after step 99"):
            engine.pause()
        assert drawing.result() is None
        assert isinstance(drawing.error, AstrayError)


def test_what_waits_at_a_step_of_its_course_ends_with_the_run(tmp_path, monkeypatch):
    network, _ = two_networks()
    stood, hand_over = threading.Event(), Pausing.hand_over
    monkeypatch.setattr(Pausing, "hand_over", lambda *args: (stood.set(), hand_over(*args)))
    with flying(tmp_path, network) as (engine, _):
        publish(engine, network)
        engine.follow([[Stand(7, 1)]])
        drawing = Drawing(engine)
        assert stood.wait(PATIENCE)
    assert drawing.result() is None
    assert isinstance(drawing.error, EngineDiedError)


def test_a_run_learns_from_completions_that_took_weights_in_flight(tmp_path, monkeypatch):
    between, seen = Session._between_steps, {}

    def counted(session):
        seen[session] = seen.get(session, 0) + 1
        if seen[session] == 9:  # in the second draw, while the learner goes on to its next publish
            session.connection.poll(PATIENCE)
        between(session)

    monkeypatch.setattr(Session, "_between_steps", counted)
    monkeypatch.setattr(RunCheckpoint, "on_train_epoch_end", lambda *args: None)  # which waits for what is drawn
    (tmp_path / "token").write_text(TOKEN.decode())
    with server() as place:
        engine = RemoteEngine(TransformersEngine(), hosts=[place], token_file=str(tmp_path / "token"))
        flight = {"schedule": "async", "max_staleness": 2, "in_flight_updates": "keep"}
        trainer, module, data = build(tmp_path, engine=engine, data=flight, trainer={"max_epochs": 4}, report=True)
        with without_plots():
            trainer.fit(module, datamodule=data)
    assert set(data.schedule.tokens_of_age) <= {0, 1, 2}
    assert data.schedule.tokens_of_age[1] > 0
    told = [row["versions"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl") if "versions" in row]
    assert told
    assert all(isinstance(version, int) and count > 0 for versions in told for version, count in versions)


def test_an_engine_that_takes_none_in_flight_never_stops(tmp_path):
    class Other(TransformersEngine):
        takes_in_flight = False

    assert RemoteEngine(TransformersEngine()).takes_in_flight
    assert not RemoteEngine(Other()).takes_in_flight
