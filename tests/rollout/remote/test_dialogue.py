"""Conversations that engines in other processes draw: the same as in this one, dealt to several, and given up."""

import threading
from types import SimpleNamespace

import pytest

from lit_qrl.errors import StoppedError
from lit_qrl.loop.turns import Conversations
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import Converses, EngineDiedError, Turn
from lit_qrl.rollout.remote.dialogue import AskedDialogue, Dealt, told
from lit_qrl.rollout.remote.engine import RemoteEngine
from tests.loop.test_turns import TOKENIZER, Echo, encode
from tests.rollout.remote.served import embedded, publish, remote

ROWS = [{"says": ["1+"] * (i % 3)} for i in range(5)]


def conversations():
    prompts = [[3 + i, 4] for i in range(len(ROWS))]
    return Conversations(Echo(), ROWS, prompts, encode, TOKENIZER.decode, max_tokens=12, seed=3)


def drawn(engine):
    with conversations() as talks:
        engine.converse(talks)
    return talks.completions()


def same(one, other):
    return [(c.token_ids, c.drawn, c.finish_reason, c.version, c.episode) for c in one] == [
        (c.token_ids, c.drawn, c.finish_reason, c.version, c.episode) for c in other
    ]


def test_an_engine_converses_where_the_one_that_it_holds_does():
    assert isinstance(RemoteEngine(TransformersEngine()), Converses)


@pytest.mark.parametrize("servers", [1, 2])
def test_conversations_are_those_of_an_engine_in_this_process(tmp_path, servers):
    with remote(tmp_path, servers=servers) as (engine, network):
        assert publish(engine, network)[0] == []
        assert same(drawn(engine), drawn(embedded(network)))
        assert engine.generate([[3, 4]], 1, 0)  # the connections are free again


class Broken:
    """A dialogue that raises when it is asked for turns."""

    open = True

    def waiting(self, wait):
        raise StoppedError("An environment blocks all others.")

    def has_ended(self, index):
        return False

    def answered(self, turn, completion):
        pytest.fail("nothing was asked")


@pytest.mark.parametrize("servers", [1, 2])
def test_what_the_dialogue_raises_ends_the_call_and_not_the_engine(tmp_path, servers):
    with remote(tmp_path, servers=servers) as (engine, network):
        assert publish(engine, network)[0] == []
        with pytest.raises(StoppedError, match="An environment blocks"):
            engine.converse(Broken())
        assert same(drawn(engine), drawn(embedded(network)))


class Mortal(TransformersEngine):
    """Dies when it is asked for a conversation."""

    def converse(self, dialogue, sampling=None):
        assert dialogue.open
        raise EngineDiedError("as the test wants")


def test_a_death_is_told(tmp_path):
    with remote(tmp_path, engine=Mortal()) as (engine, network):
        publish(engine, network)
        with pytest.raises(EngineDiedError, match="as the test wants"):
            drawn(engine)


class OneDies(TransformersEngine):
    """Dies when it is asked for a conversation, if it is the first of those that are."""

    asked = 0

    def converse(self, dialogue, sampling=None):
        OneDies.asked += 1
        if OneDies.asked == 1:
            raise EngineDiedError("as the test wants")
        super().converse(dialogue, sampling)


def test_the_others_do_not_wait_for_the_sequences_of_one_that_died(tmp_path, monkeypatch):
    monkeypatch.setattr(OneDies, "asked", 0)
    with remote(tmp_path, engine=OneDies(), servers=2) as (engine, network):
        publish(engine, network)
        with pytest.raises(EngineDiedError, match="as the test wants"):
            drawn(engine)
        assert sorted(replica.ready for replica in engine.replicas) == [False, True]
        engine.discard()
        engine.setup(engine.spec, engine.engine.policy)
        publish(engine, network)
        assert same(drawn(engine), drawn(embedded(network)))


def test_a_question_goes_to_the_run_and_what_gives_up_is_an_end():
    sent, answers = [], [("told", True), ("told", [7]), ("gone",)]
    line = SimpleNamespace(_send=lambda *message: sent.append(message), _receive=lambda: answers.pop(0))
    asked = AskedDialogue(line, 5)
    assert asked.open
    assert asked.waiting("all") == [7]
    with pytest.raises(StoppedError, match="given up"):
        asked.has_ended(3)
    assert sent == [("ask", 5, ("open",)), ("ask", 5, ("waiting", "all")), ("ask", 5, ("has_ended", 3))]
    held = SimpleNamespace(open=False, has_ended=lambda index: index == 3)
    assert (told(held, "open"), told(held, "has_ended", 3)) == (False, True)


def test_each_sequence_is_the_same_engine_s_in_every_turn():
    turns = [Turn(index=i, tokens=[i], max_tokens=1, seed=0) for i in (0, 1, 2, 3, 1)]
    gate = threading.Event()

    class Given:
        open = True

        def waiting(self, wait):
            found, turns[:] = turns[:], []
            if not found:
                gate.wait(0.05)
            return found

        has_ended = answered = None

    given = Given()
    with Dealt(given, 2) as dealt:
        odd = dealt.part(1).waiting("all")
        even = dealt.part(0).waiting("any")
        assert [turn.index for turn in odd] == [1, 3, 1]
        assert [turn.index for turn in even] == [0, 2]
        assert dealt.part(0).waiting("no") == []
        given.open = False
        gate.set()
        assert not dealt.part(0).open
